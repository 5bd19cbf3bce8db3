// A plain chat over the server's own API: streams, marks drafted text that was kept, shows the speed. No build step.

const at = (id) => document.getElementById(id);
const messages = []; // the conversation, as it is sent
let model = null;
let running = null; // the AbortController of the answer that is coming

function headers() {
  const key = at("key").value;
  return { "Content-Type": "application/json", ...(key ? { Authorization: `Bearer ${key}` } : {}) };
}

async function loadModel() {
  const got = await fetch("v1/models", { headers: headers() });
  at("keyed").hidden = got.status !== 401 && !at("key").value;
  if (!got.ok) throw new Error((await got.json()).error.message);
  model = (await got.json()).data[0];
  at("model").textContent = model.id;
  const names = model.drafters.filter((name) => name !== "prediction");
  at("drafter").replaceChildren(...names.map((name) => new Option(name, name, false, name === model.drafter)));
}

function show(kind, text = "") {
  const article = document.createElement("article");
  article.className = kind;
  article.append(text);
  at("talk").append(article);
  article.scrollIntoView({ block: "end" });
  return article;
}

// Each event of a stream of server-sent events, parsed.
async function* eventsOf(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    held += value;
    const events = held.split("\n\n");
    held = events.pop();
    for (const event of events) {
      if (!event.startsWith("data: ") || event === "data: [DONE]") continue;
      yield JSON.parse(event.slice(6));
    }
  }
}

function request() {
  return {
    model: model.id,
    messages,
    stream: true,
    stream_options: { include_usage: true },
    temperature: Number(at("temperature").value),
    max_tokens: Number(at("most").value),
    speculation: { drafter: at("drafter").value, report: true },
  };
}

function figures(began, first, report, usage) {
  const seconds = (performance.now() - first) / 1000;
  const parts = [`first token after ${((first - began) / 1000).toFixed(2)} s`];
  if (usage) {
    const tokens = usage.completion_tokens;
    parts.unshift(`${tokens} tokens`);
    if (tokens > 1 && seconds > 0) parts.push(`then ${((tokens - 1) / seconds).toFixed(1)} tokens/s`);
    parts.push(`${usage.prompt_tokens_details.cached_tokens} of ${usage.prompt_tokens} prompt tokens from the cache`);
  }
  if (report) {
    parts.push(`${(report.tokens.length / report.passes).toFixed(2)} tokens per pass`);
    if (report.proposed) parts.push(`${report.accepted} of ${report.proposed} drafted tokens kept`);
  }
  return parts.join(" · ");
}

// Show the answer's pieces as they come; returns what was said.
async function stream(article, got, began) {
  let said = "";
  let first = null;
  let report = null;
  let usage = null;
  const tail = document.createElement("footer");
  article.append(tail);
  try {
    for await (const chunk of eventsOf(got.body)) {
      if (chunk.error) throw new Error(chunk.error.message);
      if (chunk.usage) usage = chunk.usage;
      if (chunk.speculation?.passes) report = chunk.speculation;
      for (const [text, drafted] of chunk.speculation?.pieces ?? []) {
        first ??= performance.now();
        said += text;
        const piece = drafted ? document.createElement("mark") : document.createTextNode(text);
        if (drafted) piece.textContent = text;
        article.insertBefore(piece, tail);
      }
      article.scrollIntoView({ block: "end" });
    }
  } catch (error) {
    if (error.name !== "AbortError") throw error;
    tail.textContent = "stopped";
    return said;
  }
  tail.textContent = first ? figures(began, first, report, usage) : "nothing was said";
  return said;
}

async function answer() {
  running = new AbortController();
  at("send").disabled = at("retry").disabled = at("clear").disabled = true;
  at("stop").hidden = false;
  const article = show("assistant");
  const began = performance.now();
  try {
    if (!model) await loadModel();
    const got = await fetch("v1/chat/completions", {
      method: "POST",
      headers: headers(),
      body: JSON.stringify(request()),
      signal: running.signal,
    });
    if (!got.ok) throw new Error((await got.json()).error.message);
    messages.push({ role: "assistant", content: await stream(article, got, began) });
  } catch (error) {
    if (error.name === "AbortError") {
      messages.push({ role: "assistant", content: "" });
    } else {
      article.classList.add("trouble");
      article.append(`${error.message}`);
    }
  }
  running = null;
  at("stop").hidden = true;
  at("send").disabled = at("retry").disabled = at("clear").disabled = false;
  at("text").focus();
}

at("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  const text = at("text").value.trim();
  if (!text || running) return;
  if (messages.at(-1)?.role === "user") messages.pop(); // its answer failed, and another question comes instead
  messages.push({ role: "user", content: text });
  show("user", text);
  at("text").value = "";
  answer();
});
at("text").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    at("ask").requestSubmit();
  }
});
at("stop").addEventListener("click", () => running?.abort());
at("retry").addEventListener("click", () => {
  if (running || !messages.length) return;
  if (messages.at(-1).role === "assistant") messages.pop();
  at("talk").lastElementChild.remove();
  answer();
});
at("clear").addEventListener("click", () => {
  messages.length = 0;
  at("talk").replaceChildren();
  at("retry").disabled = at("clear").disabled = true;
});
at("marks").addEventListener("change", () => at("talk").classList.toggle("marked", at("marks").checked));
at("key").addEventListener("change", () => loadModel().catch((error) => show("assistant trouble", error.message)));
at("talk").classList.add("marked");
loadModel().catch((error) => show("assistant trouble", error.message));
