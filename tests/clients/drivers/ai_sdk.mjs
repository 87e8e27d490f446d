// Vercel's AI SDK with its three providers for such servers.
import { createRequire } from 'node:module'
import { MODEL, PIXEL, QUESTION, SYSTEM, run } from './shared.mjs'

const require = createRequire(`${process.cwd()}/`)
const { generateObject, generateText, stepCountIs, streamText, tool } = require('ai')
const { createAnthropic } = require('@ai-sdk/anthropic')
const { createOpenAI } = require('@ai-sdk/openai')
const { createOpenAICompatible } = require('@ai-sdk/openai-compatible')
const { z } = require('zod')

const providers = {
  chat: (url) => createOpenAI({ baseURL: `${url}/v1`, apiKey: 'unused' }).chat(MODEL),
  responses: (url) => createOpenAI({ baseURL: `${url}/v1`, apiKey: 'unused' }).responses(MODEL),
  messages: (url) => createAnthropic({ baseURL: `${url}/v1`, apiKey: 'unused' })(MODEL),
  compatible: (url) =>
    createOpenAICompatible({
      name: 'pdproxy',
      baseURL: `${url}/v1`,
      apiKey: 'unused',
      includeUsage: true,
      supportsStructuredOutputs: true,
    })(MODEL),
  completion: (url) => createOpenAI({ baseURL: `${url}/v1`, apiKey: 'unused' }).completion(MODEL),
}
const tools = {
  tide_table: tool({
    description: 'The tides of a city.',
    inputSchema: z.object({ city: z.string() }),
    execute: async ({ city }) => ({ high: 'noon', city }),
  }),
}
const image = [
  { type: 'text', text: QUESTION },
  { type: 'image', image: Buffer.from(PIXEL, 'base64'), mediaType: 'image/png' },
]

const cases = {}
for (const [name, provider] of Object.entries(providers)) {
  const asked = (url) => ({ model: provider(url), prompt: QUESTION, maxRetries: 0 })
  cases[name] = (url) => generateText({ ...asked(url), system: SYSTEM, maxOutputTokens: 16, temperature: 0, seed: 1 })
  cases[`${name}Streamed`] = (url) => streamText({ ...asked(url), stopSequences: ['END'] }).text
  if (name === 'completion') continue
  cases[`${name}Tools`] = (url) => generateText({ ...asked(url), tools, stopWhen: stepCountIs(4) })
  cases[`${name}ToolsStreamed`] = (url) => streamText({ ...asked(url), tools, stopWhen: stepCountIs(4) }).text
  cases[`${name}Object`] = (url) =>
    generateObject({ ...asked(url), schema: z.object({ city: z.string(), days: z.number() }) })
  cases[`${name}Image`] = (url) =>
    generateText({ model: provider(url), messages: [{ role: 'user', content: image }], maxRetries: 0 })
}
cases.messagesThinking = (url) =>
  generateText({
    model: providers.messages(url),
    prompt: QUESTION,
    maxRetries: 0,
    providerOptions: { anthropic: { thinking: { type: 'enabled', budgetTokens: 1024 } } },
  })
cases.responsesReasoning = (url) =>
  generateText({
    model: providers.responses(url),
    prompt: QUESTION,
    maxRetries: 0,
    providerOptions: { openai: { reasoningEffort: 'low', forceReasoning: true, store: false } },
  })

await run('ai-sdk', 'ai', cases)
