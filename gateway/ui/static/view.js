// Shows messages. Texts of users and models become text nodes and are never parsed as HTML.

export const byId = id => document.getElementById(id);

export function make(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

const seconds = ms => `${(ms / 1000).toFixed(ms < 10_000 ? 2 : 1)} s`;

function numbersOf(answer) {
  if (!answer.firstMs) return answer.finish === "stopped" ? "finish: stopped" : "";
  const parts = [`first token ${seconds(answer.firstMs - answer.startedMs)}`];
  const spanMs = answer.lastMs - answer.firstMs;
  if (answer.numTokens > 1 && spanMs > 0)
    parts.unshift(`${((answer.numTokens - 1) / spanMs * 1000).toFixed(1)} tokens/s`);
  if (answer.numTokens) parts.push(`${answer.numTokens} tokens`);
  if (answer.finish) parts.push(`finish: ${answer.finish}`);
  return parts.join(" · ");
}

// The element of one message.
export class MessageView {
  // actions: [label, function] of an answer's buttons.
  constructor(message, actions = []) {
    this.message = message;
    this.text = make("div", { class: "text" });
    const isAnswer = message.role === "assistant";
    const heads = { user: "You", assistant: "Model", tool: `Result of ${message.name}` };
    this.element = make("article", { class: `message ${message.role}` },
      make("h2", {}, heads[message.role]));
    if (isAnswer) {
      this.reasoning = make("div", { class: "text" });
      this.folded = make("details", { class: "reasoning", hidden: "" }, make("summary", {}, "Reasoning"), this.reasoning);
      this.calls = make("div", { class: "calls" });
      this.numbers = make("span", { class: "numbers" });
      this.notice = make("div", { class: "notice", hidden: "" });
      this.buttons = actions.map(([label, act]) => {
        const button = make("button", { type: "button" }, label);
        button.addEventListener("click", act);
        return button;
      });
      this.element.append(this.folded, this.text, this.calls, this.notice,
        make("div", { class: "about" }, this.numbers, ...this.buttons));
    } else this.element.append(this.text);
    if (message.pieces?.length) message.pieces.forEach(piece => this.addPiece(piece));
    else this.text.append(message.text);
    if (message.reasoning) this.addReasoning(message.reasoning);
    this.update();
  }

  add({ text, reasoning, piece }) {
    if (reasoning) this.addReasoning(reasoning);
    if (text && this.message.body.logprobs) this.addPiece(piece);
    else if (text) this.text.append(text);
  }

  addReasoning(text) {
    this.folded.hidden = false;
    this.reasoning.append(text);
  }

  // One text with the scores of its tokens; the first of all can be reached by Tab.
  addPiece(piece) {
    if (!piece.scores.length) return this.text.append(piece.text);
    const isFirst = !this.text.querySelector(".token");
    const token = make("span", { class: "token", tabindex: isFirst ? "0" : "-1" }, piece.text);
    token.scores = piece.scores;
    this.text.append(token);
  }

  update() {
    if (this.message.role !== "assistant") return;
    this.message.calls?.forEach((call, index) => {
      const box = this.calls.children[index] ?? this.calls.appendChild(make("pre"));
      box.textContent = `${call.name}(${call.arguments})`;
    });
    this.numbers.textContent = numbersOf(this.message);
    this.notice.textContent = this.message.notice;
    this.notice.hidden = !this.message.notice;
    const runs = this.message.at !== null;
    this.element.setAttribute("aria-busy", String(runs));
    for (const button of this.buttons) button.disabled = runs;
  }
}

const percent = logprob => `${(100 * Math.exp(logprob)).toFixed(1)} %`;

// Shows the likeliest alternatives of the token under the pointer or with the focus.
export function showAlternatives(log, tip) {
  const hide = () => { tip.hidden = true; };

  function show(token) {
    const table = make("table");
    for (const { token: chosen, logprob, top } of token.scores) {
      const rows = top.some(([text]) => text === chosen) ? top : [...top, [chosen, logprob]];
      for (const [text, value] of rows)
        table.append(make("tr", text === chosen ? { class: "chosen" } : {},
          make("td", {}, JSON.stringify(text)), make("td", {}, percent(value)), make("td", {}, value.toFixed(3))));
    }
    tip.replaceChildren(table);
    tip.hidden = false;
    const { left, top, bottom } = token.getBoundingClientRect();
    const { width, height } = tip.getBoundingClientRect();
    tip.style.left = `${Math.max(4, Math.min(left, innerWidth - width - 4))}px`;
    tip.style.top = `${top > height + 8 ? top - height - 4 : bottom + 4}px`;
    token.setAttribute("aria-describedby", tip.id);
  }

  const onToken = act => event => {
    const token = event.target.closest?.(".token");
    if (token) act(token, event);
  };
  log.addEventListener("mouseover", onToken(show));
  log.addEventListener("mouseout", onToken(hide));
  log.addEventListener("focusin", onToken(show));
  log.addEventListener("focusout", onToken(hide));
  log.addEventListener("scroll", hide);
  log.addEventListener("keydown", onToken((token, event) => {
    const steps = { ArrowRight: "nextElementSibling", ArrowLeft: "previousElementSibling" };
    const next = token[steps[event.key]];
    if (!next) return;
    event.preventDefault();
    token.tabIndex = -1;
    next.tabIndex = 0;
    next.focus();
  }));
}
