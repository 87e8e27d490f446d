// @anthropic-ai/sdk: what its helpers send otherwise than the Python library.
import { createRequire } from 'node:module'
import { CITY, MODEL, QUESTION, SYSTEM, run } from './shared.mjs'

const require = createRequire(`${process.cwd()}/`)
const Anthropic = require('@anthropic-ai/sdk').default

const made = (url) => new Anthropic({ baseURL: url, apiKey: 'unused', maxRetries: 0 })
const asked = { model: MODEL, max_tokens: 40, messages: [{ role: 'user', content: QUESTION }] }
const tool = {
  name: 'tide_table',
  description: 'The tides of a city.',
  input_schema: CITY,
  run: ({ city }) => `Noon at ${city}.`,
  parse: (input) => input,
}

await run('anthropic-node', '@anthropic-ai/sdk', {
  plain: (url) => made(url).messages.create(asked),
  streamHelper: (url) => made(url).messages.stream({ ...asked, system: SYSTEM }).finalMessage(),
  toolRunner: (url) => made(url).beta.messages.toolRunner({ ...asked, tools: [tool] }),
  toolRunnerStreamed: async (url) => {
    const runner = made(url).beta.messages.toolRunner({ ...asked, tools: [tool], stream: true })
    for await (const stream of runner) await stream.finalMessage()
  },
})
