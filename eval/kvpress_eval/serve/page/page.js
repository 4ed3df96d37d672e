// The page of `kvpress serve`: upload a text, ask about it, and show its kept tokens. It uses the public routes only.

const SHADES = 8; // as many as page.css has
const PART = 4096; // tokens shown at a time
const KEY = "kvpress-key"; // name in the storage of this tab

const element = Object.fromEntries([...document.querySelectorAll("[id]")].map((found) => [found.id, found]));
const state = { model: null, isChat: true, document: null, messages: [], start: 0, abort: null };

function headers() {
  const key = sessionStorage.getItem(KEY);
  return { "Content-Type": "application/json", ...(key ? { Authorization: `Bearer ${key}` } : {}) };
}

/** Return the response of a route; throw an Error with the server's message if it refuses. */
async function request(path, body, signal) {
  const options = body ? { method: "POST", body: JSON.stringify(body) } : {};
  let response;
  try {
    response = await fetch(path, { ...options, headers: headers(), signal });
  } catch (error) {
    throw error.name === "AbortError" ? error : new Error("The server does not answer.");
  }
  if (response.ok) return response;
  if (response.status === 401) askForKey();
  const content = await response.json().catch(() => ({}));
  throw new Error(content.error?.message ?? `The server answered with status ${response.status}.`);
}

/** Run an action of the user, and show its error. */
async function attempt(action) {
  element.error.textContent = "";
  try {
    await action();
  } catch (error) {
    if (error.name !== "AbortError") element.error.textContent = error.message;
  }
}

function askForKey() {
  sessionStorage.removeItem(KEY);
  element["key-form"].hidden = false;
  element.key.focus();
}

async function connect() {
  const [model] = (await (await request("v1/models")).json()).data;
  element["key-form"].hidden = true;
  state.model = model.id;
  state.isChat = model.chat;
  element.model.textContent = model.id;
  element.press.replaceChildren(...model.presses.map((press) => new Option(press, press)));
  element["question-label"].textContent = model.chat ? "Question about the text" : "Words after the text, which the model continues";
  element.press.disabled = element.compress.disabled = false;
}

const decimals = new Intl.NumberFormat("en", { maximumFractionDigits: 1 });

function bytes(number) {
  const units = ["bytes", "KiB", "MiB", "GiB"];
  const power = Math.min(units.length - 1, Math.floor(Math.log2(Math.max(1, number)) / 10));
  return `${decimals.format(number / 1024 ** power)} ${units[power]}`;
}

async function compress() {
  const button = element.compress;
  button.disabled = true;
  element.progress.textContent = "Reading the text…";
  stop();
  try {
    const body = { text: element.text.value, press: element.press.value };
    const uploaded = await (await request("v1/documents", body)).json();
    state.document = uploaded.id;
    state.start = 0;
    element.tokens.textContent = decimals.format(uploaded.tokens);
    element.before.textContent = uploaded.bytes_uncompressed === undefined ? "unknown" : bytes(uploaded.bytes_uncompressed);
    element.after.textContent = uploaded.bytes === undefined ? "unknown" : bytes(uploaded.bytes);
    element.factor.textContent = uploaded.bytes ? decimals.format(uploaded.bytes_uncompressed / uploaded.bytes) : "unknown";
    element.sizes.hidden = false;
    element.question.disabled = element.send.disabled = false;
    element.progress.textContent = uploaded.cached ? "Compressed; the server had this text already." : "Compressed.";
    forget();
    await showKept();
  } catch (error) {
    element.progress.textContent = "";
    throw error;
  } finally {
    button.disabled = false;
  }
}

async function showKept() {
  const path = `v1/documents/${encodeURIComponent(state.document)}/tokens?start=${state.start}&limit=${PART}`;
  const kept = await (await request(path)).json();
  element.map.replaceChildren(
    ...kept.texts.map((text, index) => {
      const token = document.createElement("span");
      token.textContent = text;
      token.dataset.k = Math.ceil(SHADES * kept.shares[index]);
      token.title = `${Math.round(100 * kept.shares[index])} % of heads`;
      return token;
    }),
  );
  const end = kept.start + kept.texts.length;
  const share = decimals.format(100 * kept.kept);
  element["kept-summary"].textContent =
    `${kept.press} keeps ${share} % of all pairs; ${kept.evicted} of ${kept.total} tokens are held by no head.`;
  element.range.textContent = `Tokens ${kept.start + 1} to ${end} of ${kept.total}`;
  element.parts.hidden = kept.total <= PART;
  element.previous.disabled = kept.start === 0;
  element.next.disabled = end >= kept.total;
  element.kept.hidden = false;
}

function turn(step) {
  state.start = Math.max(0, state.start + step);
  return showKept();
}

function entry(kind, text) {
  const article = document.createElement("article");
  const heading = document.createElement("h3");
  const content = document.createElement("div");
  article.className = kind.toLowerCase();
  heading.textContent = kind;
  content.textContent = text;
  article.append(heading, content);
  element.log.append(article);
  element.log.scrollTop = element.log.scrollHeight;
  return content;
}

function forget() {
  stop();
  state.messages = [];
  element.log.replaceChildren();
  element.clear.disabled = true;
}

function stop() {
  state.abort?.abort();
}

/** Yield the data of server-sent events. */
async function* eventsOf(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let buffer = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) throw new Error("The answer broke off.");
    const events = (buffer + value).split("\n\n");
    buffer = events.pop();
    for (const event of events) {
      const data = event.replace(/^data: /, "");
      if (data === "[DONE]") return;
      yield JSON.parse(data);
    }
  }
}

function bodyOf(messages, question) {
  const shared = {
    model: state.model, document: state.document, stream: true, temperature: 0, max_tokens: element.longest.valueAsNumber,
  };
  return state.isChat ? { ...shared, messages } : { ...shared, prompt: question };
}

async function ask() {
  const question = element.question.value;
  const messages = [...state.messages, { role: "user", content: question }];
  if (!element.log.querySelector("article")) element.log.replaceChildren();
  const asked = entry("Question", question);
  const answer = entry("Answer", "");
  const abort = (state.abort = new AbortController());
  element.send.hidden = true;
  element.stop.hidden = element.clear.disabled = false;
  element.log.setAttribute("aria-busy", "true");
  try {
    const response = await request(state.isChat ? "v1/chat/completions" : "v1/completions", bodyOf(messages, question), abort.signal);
    for await (const event of eventsOf(response)) {
      if (event.error) throw new Error(event.error.message);
      const [choice] = event.choices;
      answer.append(choice?.delta?.content ?? choice?.text ?? "");
      element.log.scrollTop = element.log.scrollHeight;
    }
    element.question.value = "";
  } finally {
    if (state.abort === abort) {
      state.abort = null;
      element.send.hidden = false;
      element.stop.hidden = true;
      element.log.setAttribute("aria-busy", "false");
    }
    // A stopped answer stays in the conversation as far as it came; a question without any answer does not.
    if (!answer.textContent) {
      asked.parentElement.remove();
      answer.parentElement.remove();
    } else if (answer.isConnected) {
      state.messages = [...messages, { role: "assistant", content: answer.textContent }];
    }
  }
}

async function readFile(file) {
  try {
    element.text.value = new TextDecoder("utf-8", { fatal: true }).decode(await file.arrayBuffer());
  } catch {
    throw new Error(`${file.name} is not a text file in UTF-8.`);
  }
  element.progress.textContent = `${file.name}: ${bytes(file.size)}`;
}

function onSubmit(form, action) {
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    attempt(action);
  });
}

onSubmit(element["key-form"], () => {
  sessionStorage.setItem(KEY, element.key.value.trim());
  element.key.value = "";
  return connect();
});
onSubmit(element["text-form"], compress);
onSubmit(element["question-form"], ask);
element.question.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing && !element.send.hidden) {
    event.preventDefault();
    element["question-form"].requestSubmit();
  }
});
element.stop.addEventListener("click", stop);
element.clear.addEventListener("click", forget);
element.previous.addEventListener("click", () => attempt(() => turn(-PART)));
element.next.addEventListener("click", () => attempt(() => turn(PART)));
element.file.addEventListener("change", () => {
  const [file] = element.file.files;
  element.file.value = ""; // the same file can be chosen again
  if (file) attempt(() => readFile(file));
});
for (const kind of ["dragover", "dragleave", "drop"]) {
  element["text-form"].addEventListener(kind, (event) => {
    const [file] = event.dataTransfer.files;
    if (kind === "drop" && !file) return; // a dropped piece of text goes where the browser puts it
    if (kind !== "dragleave" && event.dataTransfer.types.includes("Files")) event.preventDefault();
    element["text-form"].classList.toggle("dropping", kind === "dragover");
    if (file && kind === "drop") attempt(() => readFile(file));
  });
}
attempt(connect);
