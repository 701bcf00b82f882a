"use strict";
(() => {
  const root = document.documentElement;
  const all = (selector, within = document) => [...within.querySelectorAll(selector)];

  // Colours: figures name those of the style sheet; a probe says what they are in the colours now chosen.
  const probe = document.body.appendChild(document.createElement("i"));
  probe.hidden = true;

  function painted(value) {
    if (Array.isArray(value)) return value.map(painted);
    if (value !== null && typeof value === "object") {
      return Object.fromEntries(Object.entries(value).map(([name, part]) => [name, painted(part)]));
    }
    if (typeof value === "string" && value.startsWith("var(--")) {
      probe.style.color = value;
      return getComputedStyle(probe).color;
    }
    return value;
  }

  // Figures: drawn one after the other where they show; hidden ones when they are first needed.
  const CONFIG = { displayModeBar: false, doubleClick: false, showTips: false };
  const FONT = getComputedStyle(document.body).fontFamily;
  const drawn = new WeakMap();  // plot -> the colours and the width that it was drawn for
  const specOf = (plot) => JSON.parse(plot.nextElementSibling.textContent);
  const layoutOf = (spec) => painted({ ...spec.layout, font: { ...spec.layout.font, family: FONT } });
  const shows = (element) => element.offsetParent !== null;
  let colours = 0;
  const wanted = (plot) => `${colours} ${plot.clientWidth}`;

  function draw(plot) {
    const spec = specOf(plot);
    const size = { width: plot.clientWidth, height: plot.clientHeight };
    Plotly.react(plot, painted(spec.data), { ...layoutOf(spec), ...size }, CONFIG);
    drawn.set(plot, wanted(plot));
  }

  function drawNext() {
    const plot = all(".plot").find((item) => shows(item) && drawn.get(item) !== wanted(item));
    if (plot === undefined) {
      root.dataset.drawn = "yes";
      return;
    }
    draw(plot);
    setTimeout(drawNext);
  }

  function drawAll() {
    root.dataset.drawn = "no";
    drawNext();
  }

  function redrawAll() {
    colours += 1;
    drawAll();
  }

  async function save(plot) {
    const spec = specOf(plot);
    const layout = layoutOf(spec);
    const many = (plot.data || []).length > 4 ? 40 : 0;
    layout.title = { text: spec.title, subtitle: { text: spec.subtitle }, x: 0.01, xanchor: "left", y: 0.97, yanchor: "top" };
    layout.margin = { ...layout.margin, t: 100 + many, l: 16, r: 16, b: 16 };
    const url = await Plotly.toImage(
      { data: painted(spec.data), layout },
      { format: "svg", width: 900, height: plot.clientHeight + 120 + many },
    );
    const link = document.createElement("a");
    link.href = url;
    link.download = `${spec.file}.svg`;
    link.click();
  }

  all(".save").forEach((button) => {
    button.addEventListener("click", () => save(button.closest("figure").querySelector(".plot")));
  });

  // Switches: copies of one switch move together, and blocks show where all of theirs are at the right position.
  const state = {};
  all("[data-switch]").forEach((group) => {
    state[group.dataset.switch] ??= group.querySelector("input:checked").value;
    group.addEventListener("change", (event) => {
      const name = group.dataset.switch;
      const before = group.getBoundingClientRect().top;
      state[name] = event.target.value;
      all(`[data-switch="${name}"] input`).forEach((input) => { input.checked = input.value === state[name]; });
      apply();
      // What is above may have grown or shrunk: the switch stays under the finger.
      window.scrollBy({ top: group.getBoundingClientRect().top - before, behavior: "instant" });
    });
  });

  function apply() {
    all(".when").forEach((block) => {
      block.hidden = Object.entries(state).some(([name, value]) => {
        const wanted = block.getAttribute(`data-when-${name}`);
        return wanted !== null && wanted !== value;
      });
    });
    drawAll();
  }

  // Light or dark: as the system says, or as chosen here. Paper is always light.
  const theme = document.getElementById("theme");
  const scheme = (name) => { root.style.colorScheme = name === "auto" ? "" : name; };
  theme.addEventListener("change", () => { scheme(theme.value); redrawAll(); });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redrawAll);
  addEventListener("resize", drawAll);
  addEventListener("beforeprint", () => {
    scheme("light");
    colours += 1;
    all(".plot").filter(shows).forEach(draw);
  });
  addEventListener("afterprint", () => { scheme(theme.value); redrawAll(); });

  apply();

  // Answers, token by token.
  const holder = document.getElementById("answers");
  if (holder === null) return;
  const SOURCES = ["first", "drafted", "bonus", "correction"];
  const FINISH = { end_of_text: "ended by itself", length: "cut by the length limit" };
  const FIELDS = ["drafter", "benchmark", "prompt", "temperature"];
  const samples = JSON.parse(document.getElementById("samples").textContent);
  const tip = document.getElementById("tip");
  const choices = Object.fromEntries(FIELDS.map((name) => [name, document.querySelector(`[data-choice="${name}"]`)]));
  const wish = { temperature: state.temperature };
  let described = new WeakMap();

  function element(tag, className, text) {
    const made = document.createElement(tag);
    made.className = className;
    if (text !== undefined) made.textContent = text;
    return made;
  }

  // Each selector offers what is there for those before it, and keeps its value where it can.
  function choose() {
    let left = samples;
    FIELDS.forEach((name) => {
      const offered = [...new Set(left.map((sample) => sample[name]))];
      const select = choices[name];
      const value = offered.includes(wish[name]) ? wish[name] : offered[0];
      select.replaceChildren(...offered.map((text) => new Option(text, text, false, text === value)));
      select.disabled = offered.length < 2;
      left = left.filter((sample) => sample[name] === value);
    });
    holder.replaceChildren(...left.flatMap(turnParts));
    hideTip();
  }

  function turnParts(sample) {
    const title = sample.turn > 0 ? `Turn ${sample.turn + 1}, asked:\n` : "";
    return [element("div", "asked", title + sample.asked), element("p", "stats", stats(sample)), answer(sample)];
  }

  function stats(sample) {
    const rounds = new Set(sample.round.filter((number) => number !== null)).size;
    const committed = sample.round.filter((number) => number !== null).length;
    const drafted = sample.source.filter((number) => SOURCES[number] === "drafted").length;
    const parts = [`${sample.text.length} tokens`, `${rounds} rounds`];
    if (rounds > 0) {
      parts.push(`accepted length of this answer ${(committed / rounds).toFixed(2)} with the bonus token, ` +
        `${(drafted / rounds).toFixed(2)} without`);
    }
    parts.push(FINISH[sample.finish] ?? sample.finish);
    return parts.join(" · ");
  }

  function answer(sample) {
    const box = element("div", "answer");
    box.setAttribute("role", "group");
    box.setAttribute("aria-label", "Answer: the arrow keys go from token to token, up and down from round to round");
    sample.text.forEach((text, place) => {
      const token = element("span", `token ${SOURCES[sample.source[place]]}`, text);
      if (text === "") token.classList.add("empty");
      else if (/^[\r\n]+$/.test(text)) token.classList.add("line");
      token.tabIndex = place === 0 ? 0 : -1;
      token.dataset.round = sample.round[place] ?? "";
      described.set(token, () => describe(sample, place));
      box.append(token);
    });
    return box;
  }

  function describe(sample, place) {
    const source = SOURCES[sample.source[place]];
    const confidence = sample.confidence[place];
    const shown = JSON.stringify(sample.text[place]);
    const lines = [`${shown} · ${source}`];
    const number = sample.round[place];
    if (number !== null) {
      const members = sample.round.map((other, index) => (other === number ? index : -1)).filter((index) => index >= 0);
      lines.push(`round ${number + 1}, token ${members.indexOf(place) + 1} of the ${members.length} that it added`);
    } else lines.push("of no round: the target wrote it while it read the prompt");
    if (source === "correction") {
      lines.push(`rejected draft token: ${JSON.stringify(sample.rejected[place] ?? "not recorded")}`);
    }
    const whose = source === "correction" ? "its confidence" : "confidence";
    if (confidence !== null) lines.push(`${whose}: ${confidence.toFixed(3)}`);
    else if (source === "drafted" || source === "correction") {
      lines.push(sample.confident ? `${whose}: not recorded` : "no confidence: this drafter has no confidence head");
    }
    return lines.join("\n");
  }

  function showTip(token) {
    hideTip();
    tip.textContent = described.get(token)();
    tip.hidden = false;
    token.classList.add("now");
    token.setAttribute("aria-describedby", "tip");
    if (token.dataset.round !== "") {
      all(`[data-round="${token.dataset.round}"]`, token.parentNode).forEach((other) => other.classList.add("round"));
    }
    const [box] = token.getClientRects().length > 0 ? token.getClientRects() : [token.getBoundingClientRect()];
    const section = tip.offsetParent.getBoundingClientRect();
    const widest = document.documentElement.clientWidth - tip.offsetWidth - 8;
    const left = Math.max(8, Math.min(box.left, widest));
    const above = box.top - tip.offsetHeight - 8;
    tip.style.left = `${left - section.left}px`;
    tip.style.top = `${(above > 0 ? above : box.bottom + 8) - section.top}px`;
  }

  function hideTip() {
    tip.hidden = true;
    all(".token.now, .token.round", holder).forEach((token) => {
      token.classList.remove("now", "round");
      token.removeAttribute("aria-describedby");
    });
  }

  function step(token, key) {
    const tokens = [...token.parentNode.children];
    const place = tokens.indexOf(token);
    const other = (item) => item.dataset.round !== token.dataset.round;
    const before = tokens.slice(0, place).reverse().find(other);
    return {
      ArrowRight: tokens[place + 1],
      ArrowLeft: tokens[place - 1],
      Home: tokens[0],
      End: tokens[tokens.length - 1],
      ArrowDown: tokens.slice(place).find(other),
      ArrowUp: before && tokens.find((item) => item.dataset.round === before.dataset.round),
    }[key];
  }

  const tokenOf = (event) => event.target.closest?.("#answers .token");
  holder.addEventListener("pointerover", (event) => { const token = tokenOf(event); if (token) showTip(token); });
  holder.addEventListener("pointerleave", () => {
    const focused = holder.querySelector(".token:focus");
    if (focused) showTip(focused); else hideTip();
  });
  holder.addEventListener("focusin", (event) => { const token = tokenOf(event); if (token) showTip(token); });
  holder.addEventListener("focusout", hideTip);
  holder.addEventListener("keydown", (event) => {
    const token = tokenOf(event);
    if (!token) return;
    if (event.key === "Escape") { hideTip(); return; }
    const next = step(token, event.key);
    if (!next) return;
    event.preventDefault();
    token.tabIndex = -1;
    next.tabIndex = 0;
    next.focus();
  });
  FIELDS.forEach((name) => choices[name].addEventListener("change", () => {
    FIELDS.forEach((field) => { wish[field] = choices[field].value; });
    choose();
  }));
  // The page's temperature holds here as well, until another one is chosen for the answers.
  all('[data-switch="temperature"]').forEach((group) => group.addEventListener("change", (event) => {
    wish.temperature = event.target.value;
    choose();
  }));
  choose();
})();
