// What the JavaScript drivers share: the texts, and a loop that runs all cases of a client, each
// with a base URL of its own. A driver's argument is the server's URL; it runs in the folder of its
// packages.
import { readFileSync } from 'node:fs'

export const MODEL = 'tiny'
export const QUESTION = 'When is the tide high at Oslo? Answer in one sentence, without any greeting.'
export const SYSTEM = 'You are the clerk of a harbour. Your answers are short, and they name their source.'
export const CITY = { type: 'object', properties: { city: { type: 'string' } }, required: ['city'] }
export const PIXEL =
  'iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=='

export async function run(client, name, cases) {
  const file = `${process.cwd()}/node_modules/${name}/package.json`
  const version = JSON.parse(readFileSync(file)).version
  for (const [label, call] of Object.entries(cases)) {
    try {
      await call(`${process.argv[2]}/${client}@${version}/${label.replace(/[A-Z]/g, (c) => '-' + c.toLowerCase())}`)
    } catch (error) {
      console.error(`${client}, ${label}:`, error)
      process.exitCode = 1
    }
  }
}
