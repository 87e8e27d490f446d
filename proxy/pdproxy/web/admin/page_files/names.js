// Engines by short names: where all are on one host, by their ports.

let host = null;

const parts = (url) => url.replace(/^https?:\/\//, "").match(/^(.*?)(:\d+)?$/);

/** Choose names that tell these engines apart. */
export function learn(urls) {
  const hosts = new Set(urls.map((url) => parts(url)[1]));
  host = urls.length > 1 && hosts.size === 1 ? [...hosts][0] : null;
}

/** An engine's short name. */
export function short(url) {
  const [whole, at, port] = parts(url);
  return at === host && port ? port : whole;
}
