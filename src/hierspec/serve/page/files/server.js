// Calls to the server that this page came from.

let key = ""; // in memory alone: gone with the page

export const useKey = (given) => { key = given.trim(); };

const headers = () => ({ "Content-Type": "application/json", ...(key ? { Authorization: `Bearer ${key}` } : {}) });

export class Refused extends Error {
  constructor(sentence, status) { super(sentence); this.status = status; }
}

async function called(path, options = {}) {
  let response;
  try {
    response = await fetch(path, { ...options, headers: headers() });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Refused("The server cannot be reached; it may have been stopped.", 0);
  }
  if (!response.ok) throw new Refused(await sentenceOf(response), response.status);
  return response;
}

async function sentenceOf(response) {
  try {
    return (await response.json()).error.message;
  } catch {
    return `The server answered with status ${response.status}.`;
  }
}

export const state = async () => (await called("hierspec/state")).json();

/** The answer as steps: calls `onStep` with the details of each pass; returns why it ended. */
export async function chat(body, signal, onStep) {
  const response = await called("v1/chat/completions", {
    method: "POST",
    body: JSON.stringify({ ...body, stream: true, details: true }),
    signal,
  });
  let ended = null;
  for await (const data of events(response.body)) {
    if (data === "[DONE]") break;
    const chunk = JSON.parse(data);
    if (chunk.error) throw new Refused(chunk.error.message, 200);
    if (chunk.hierspec) onStep(chunk.hierspec);
    ended = chunk.choices[0]?.finish_reason ?? ended;
  }
  if (ended === null) throw new Refused("The connection ended before the answer did; send it again.", 200);
  return ended;
}

/** Server-sent events: what stands after "data:", one string an event. */
async function* events(stream) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  let waiting = "";
  while (true) {
    const { done, value } = await reader.read();
    if (done) return;
    const parts = (waiting + value).split("\n\n");
    waiting = parts.pop();
    for (const part of parts) {
      for (const line of part.split("\n")) if (line.startsWith("data:")) yield line.slice(5).trim();
    }
  }
}
