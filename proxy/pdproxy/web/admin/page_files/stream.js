// The server-sent events of the admin API. EventSource can send no key, so they are read here.

/** The API has refused a request, or can't be reached (status 0). */
export class Refused extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

async function ask(path, key, options) {
  const headers = key === null ? {} : { authorization: `Bearer ${key}` };
  let answer;
  try {
    answer = await fetch(path, { headers, cache: "no-store", ...options });
  } catch (error) {
    if (options.signal?.aborted) throw error;
    throw new Refused(0, "pdproxy does not answer");
  }
  if (!answer.ok) {
    let message = `pdproxy answers ${answer.status}`;
    try {
      message = (await answer.json()).error.message;
    } catch { /* not of the API: something between has answered */ }
    throw new Refused(answer.status, message);
  }
  return answer;
}

/** Change something. Return what the API answers. */
export async function post(path, key) {
  return (await ask(path, key, { method: "POST" })).json();
}

/** Yield the events, [name, data] each, until the connection ends. */
export async function* events(path, key, signal) {
  const answer = await ask(path, key, { signal });
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    rest += value;
    for (let end; (end = rest.indexOf("\n\n")) >= 0; rest = rest.slice(end + 2)) {
      const [name, data] = rest.slice(0, end).split("\n");
      yield [name.slice("event: ".length), JSON.parse(data.slice("data: ".length))];
    }
  }
}
