// openai-node: what its helpers send otherwise than openai-python.
import { createRequire } from 'node:module'
import { CITY, MODEL, PIXEL, QUESTION, SYSTEM, run } from './shared.mjs'

const require = createRequire(`${process.cwd()}/`)
const OpenAI = require('openai').default
const { zodResponseFormat } = require('openai/helpers/zod')
const { z } = require('zod')

const made = (url) => new OpenAI({ baseURL: `${url}/v1`, apiKey: 'unused', maxRetries: 0 })
const user = { role: 'user', content: QUESTION }
const asked = { model: MODEL, messages: [{ role: 'system', content: SYSTEM }, user] }
const trip = z.object({ city: z.string(), days: z.number().int() })
const tideTable = {
  name: 'tide_table',
  description: 'The tides of a city.',
  parameters: CITY,
  function: ({ city }) => `Noon at ${city}.`,
  parse: JSON.parse,
}

await run('openai-node', 'openai', {
  chat: (url) => made(url).chat.completions.create(asked),
  async streamed(url) {
    const stream = await made(url).chat.completions.create({ ...asked, stream: true })
    for await (const _ of stream);
  },
  parse: (url) =>
    made(url).chat.completions.parse({ ...asked, response_format: zodResponseFormat(trip, 'trip') }),
  runTools: (url) =>
    made(url)
      .chat.completions.runTools({ ...asked, tools: [{ type: 'function', function: tideTable }] })
      .finalContent(),
  runToolsStreamed: (url) =>
    made(url)
      .chat.completions.runTools({ ...asked, stream: true, tools: [{ type: 'function', function: tideTable }] })
      .finalContent(),
  image: (url) =>
    made(url).chat.completions.create({
      model: MODEL,
      messages: [
        {
          role: 'user',
          content: [
            { type: 'text', text: QUESTION },
            { type: 'image_url', image_url: { url: `data:image/png;base64,${PIXEL}` } },
          ],
        },
      ],
    }),
  completion: (url) => made(url).completions.create({ model: MODEL, prompt: QUESTION }),
  responses: (url) => made(url).responses.create({ model: MODEL, input: QUESTION, instructions: SYSTEM }),
  responsesStreamed: (url) => made(url).responses.stream({ model: MODEL, input: [user] }).finalResponse(),
})
