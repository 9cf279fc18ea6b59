// The drawings: a panel without a line is put away, and so is a drawing without a panel, or with all in one.

const drawings = [...document.querySelectorAll("#plots figure")].map((figure) => {
  const panels = [...figure.querySelectorAll("g[data-suite]")];
  const svg = figure.querySelector("svg");
  // Where panels stand: their first part is their background.
  return { figure, panels, svg, box: svg.getAttribute("viewBox"), places: panels.map((panel) => panel.querySelector("path").getBBox()) };
});
// The panels that are left move up to the first places, and the legend below them.
const closeGaps = ({ panels, svg, box, places }) => {
  const left = [...panels.keys()].filter((number) => !panels[number].hasAttribute("hidden"));
  if (!left.length) return;
  const move = (element, x, y) => element.setAttribute("transform", `translate(${x} ${y})`);
  left.forEach((number, at) => move(panels[number], places[at].x - places[number].x, places[at].y - places[number].y));
  const gap = places.at(-1).y - places[left.length - 1].y;
  move(svg.querySelector("[data-part=legend]"), 0, -gap);
  const [x, y, width, height] = box.split(" ").map(Number);
  svg.setAttribute("viewBox", [x, y, width, height - gap].join(" "));
};
document.addEventListener("scoped", () => {
  const away = [];
  const narrowed = Object.values(scope).some(Boolean);
  for (const drawing of drawings) {
    const { figure, panels } = drawing;
    for (const panel of panels) {
      if (!panel.querySelector("[data-method]:not([hidden])")) panel.setAttribute("hidden", "");
    }
    figure.hidden = narrowed && panels.every((panel) => panel.hasAttribute("hidden"));
    if (figure.hidden) away.push(figure.dataset.name);
    else closeGaps(drawing);
  }
  at("away").hidden = !away.length;
  at("away").querySelector("span").textContent = away.join(", ");
});

// The answers of a run.
const showAnswers = ({ rows, texts, lengths, prompts }) => {
  // What is packed: the tokens of a text, and the rounds of a row as [drafted, accepted, emitted, draft ms, verify ms].
  const piecesOf = (row) => {
    let end = 0;
    return lengths[row.text].map((length) => texts[row.text].slice(end, end += length));
  };
  const roundsOf = ({ counts, times }) => Array.from({ length: counts.length / 3 }, (_, place) =>
    [...counts.slice(3 * place, 3 * place + 3), ...(times ?? []).slice(2 * place, 2 * place + 2).map((us) => us / 1000)]);

  // The list

  const number = (digits) => (value) => value === undefined ? "–" : value.toFixed(digits);
  const right = (row) => row.passed === undefined ? "–" : row.passed ? "right" : "wrong";
  const same = (row) => row.error !== undefined ? "failed" : (row.exact || "–").replace("_", " ");
  const name = (row) => row.prompt + (row.turn ? ` turn ${row.turn + 1}` : "") + (row.repeat ? ` repeat ${row.repeat + 1}` : "");
  const columns = [
    { head: "prompt", key: name, name: true },
    { head: "suite", key: (row) => row.suite, name: true, spare: true },
    { head: "method", key: (row) => methodName(row.method), name: true },
    { head: "tokens", key: (row) => row.tokens, show: number(0), spare: true },
    { head: "rounds", key: (row) => row.rounds, show: number(0), spare: true },
    { head: "al", title: "mean over rounds of a_i + 1", key: (row) => row.al, show: number(2) },
    { head: "ms / token", key: (row) => row.ms, show: number(2), spare: true },
    { head: "speed-up", key: (row) => row.speedup, show: number(2) },
    { head: "exact", key: same, narrow: true },
    { head: "answer", key: right },
  ];
  const isOther = (row) => [row.exact, row.audit].some((verdict) => verdict !== undefined && verdict !== "exact");
  const outcomes = {
    "right": (row) => row.passed === true,
    "wrong": (row) => row.passed === false,
    "not exact": isOther,
    "cut at the limit": (row) => row.finish === "length",
    "failed": (row) => row.error !== undefined,
    "slower than plain": (row) => row.speedup < 1,
  };
  // Those that a reader would look for come first; what has no such figure comes last.
  const orders = {
    "not exact first": (row) => (row.error !== undefined ? 0 : isOther(row) ? 1 : 2),
    "wrong first": (row) => (row.passed === false ? 0 : row.passed === undefined ? 2 : 1),
    "fewest accepted first": (row) => row.al !== undefined && row.counts ? row.al : Infinity,
    "least speed-up first": (row) => row.speedup ?? Infinity,
  };
  const whole = (row) => texts[row.text];
  const isSplit = (row) => Boolean(lengths[row.text]);
  const question = (row) => prompts[row.asked] ?? "";

  const mood = (text) => ({ right: "fine", exact: "fine", wrong: "bad", mismatch: "bad", failed: "bad" })[text] || "";
  const kind = (column) => [column.name && "name", column.spare && "spare", column.narrow && "narrow"].filter(Boolean).join(" ");
  const line = (item) => {
    const tr = make("tr", "row");
    for (const [place, column] of columns.entries()) {
      const value = column.key(item.row);
      const label = column.show ? column.show(value) : value;
      const td = make("td", kind(column));
      if (place === 0) {
        const button = breakable(make("button"), label);
        button.type = "button";
        button.setAttribute("aria-expanded", "false");
        td.append(button);
      } else {
        td.append(column.name ? breakable(make("span"), label) : make("span", mood(label), label));
      }
      tr.append(td);
    }
    // The button's click reaches the row, so one listener serves both.
    tr.addEventListener("click", () => {
      toggle(item);
      if (item.open) history.replaceState(null, "", address(item.row));
    });
    return tr;
  };
  const items = rows.map((row) => ({ row, made: null, open: null }));
  const heads = document.querySelector("#list thead tr");
  let sorted = { place: -1, up: true };
  let listed = [];
  let current = null;

  // Of ten thousand rows only those near what is seen are there: a part of the list that is far has its height alone.
  // A list of a few parts is there as a whole, for whoever prints it or searches the page.
  const IN_PART = 50;
  const FEW_PARTS = 4;
  const NEAR = "1200px 0px";
  let parts = [];
  let rowHeight = 34;
  const partOf = new WeakMap();
  const fill = (part) => {
    if (!part || part.full) return;
    part.full = true;
    part.body.replaceChildren(...part.items.flatMap((item) => {
      item.made ??= line(item);
      return item.open ? [item.made, item.open] : [item.made];
    }));
  };
  const holdPlace = (part, height) => {
    const tr = make("tr");
    const td = make("td");
    td.colSpan = columns.length;
    td.style.height = `${height}px`;
    tr.append(td);
    part.body.replaceChildren(tr);
  };
  const empty = (part) => {
    if (!part.full || part.body.contains(document.activeElement)) return;
    const height = part.body.offsetHeight;
    if (!part.items.some((item) => item.open)) rowHeight = height / part.items.length;
    part.full = false;
    holdPlace(part, height);
    for (const item of part.items) if (!item.open) item.made = null;
  };
  const watch = new IntersectionObserver((seen) => {
    for (const { target, isIntersecting } of seen) (isIntersecting ? fill : empty)(partOf.get(target));
  }, { rootMargin: NEAR });
  // A row of the longest texts, without height, so that columns do not move while the list is scrolled.
  const widest = () => {
    const body = make("tbody", "widest");
    const tr = make("tr", "widest");
    body.setAttribute("aria-hidden", "true");
    for (const column of columns) {
      const texts = listed.map(({ row }) => (column.show ?? String)(column.key(row)));
      const longest = texts.reduce((most, text) => text.length > most.length ? text : most, "");
      const td = make("td", kind(column));
      td.append(breakable(make("span"), column.key === name ? `▸ ${longest}` : longest));
      tr.append(td);
    }
    body.append(tr);
    return body;
  };

  const compare = (a, b) => {
    if (a === b) return 0;
    if (a === undefined) return 1;
    if (b === undefined) return -1;
    return typeof a === "number" ? a - b : String(a).localeCompare(String(b), "en", { numeric: true });
  };
  const render = () => {
    watch.disconnect();
    for (const item of items) if (!item.open) item.made = null;
    parts = Array.from({ length: Math.ceil(listed.length / IN_PART) }, (_, number) =>
      ({ body: make("tbody"), items: listed.slice(number * IN_PART, (number + 1) * IN_PART), full: false }));
    for (const part of parts) {
      partOf.set(part.body, part);
      holdPlace(part, rowHeight * part.items.length);
    }
    const isShort = parts.length <= FEW_PARTS;
    for (const part of parts.slice(0, isShort ? FEW_PARTS : 1)) fill(part);
    for (const body of at("list").querySelectorAll("tbody")) body.remove();
    at("list").append(widest(), ...parts.map(({ body }) => body));
    for (const { body } of isShort ? [] : parts) watch.observe(body);
    at("count").textContent = `${listed.length} of ${items.length}`;
  };
  const show = () => {
    const words = at("find").value.toLowerCase();
    listed = items.filter(({ row }) =>
      inScope(row.bare, row.method, row.settings) &&
      (!at("outcome").value || outcomes[at("outcome").value](row)) &&
      (!words || name(row).toLowerCase().includes(words) || whole(row).toLowerCase().includes(words) || question(row).toLowerCase().includes(words)));
    const order = orders[at("sort").value];
    if (sorted.place >= 0) {
      const { key } = columns[sorted.place];
      // What is not there comes last both ways.
      listed.sort((a, b) => {
        const [x, y] = [key(a.row), key(b.row)];
        return compare(x, y) * (sorted.up || x === undefined || y === undefined ? 1 : -1);
      });
    } else if (order) {
      listed.sort((a, b) => order(a.row) - order(b.row) || 0);
    }
    render();
    drawMap();
  };
  const showHeads = () => {
    for (const [place, head] of [...heads.children].entries()) {
      head.setAttribute("aria-sort", sorted.place !== place ? "none" : sorted.up ? "ascending" : "descending");
    }
  };
  columns.forEach((column, place) => {
    const th = make("th", kind(column));
    th.scope = "col";
    const button = make("button", "", column.head);
    button.type = "button";
    if (column.title) button.title = column.title;
    th.append(button);
    button.addEventListener("click", () => {
      sorted = { place, up: sorted.place === place ? !sorted.up : true };
      at("sort").value = "";
      showHeads();
      show();
    });
    heads.append(th);
  });
  showHeads();
  const offer = (id, names) => names.forEach((value) => {
    const option = make("option", "", value);
    option.value = value;
    at(id).append(option);
  });
  offer("outcome", Object.keys(outcomes).filter((value) => rows.some(outcomes[value])));
  offer("sort", Object.keys(orders));
  at("sort").addEventListener("input", () => { sorted = { place: -1, up: true }; showHeads(); });
  at("filter").addEventListener("input", show);
  at("filter").addEventListener("submit", (event) => event.preventDefault());

  // Where acceptance drops off: a line for each answer that is listed

  const MOST_LINES = 400;
  let mapped = [];
  const lineHeight = () => mapped.length > 150 ? 3 : mapped.length > 50 ? 5 : 9;
  const drawMap = () => {
    mapped = listed.filter(({ row }) => row.counts).slice(0, MOST_LINES);
    at("map").hidden = !mapped.length;
    if (!mapped.length) return;
    const canvas = at("map").querySelector("canvas");
    const probe = make("i");
    at("map").append(probe);
    const colour = (variable) => { probe.style.color = `var(${variable})`; return getComputedStyle(probe).color; };
    const [light, dark, empty] = [colour("--kept"), colour("--lost"), colour("--ground")];
    probe.remove();
    const longest = Math.max(...mapped.map(({ row }) => row.tokens));
    const height = lineHeight();
    canvas.width = Math.max(300, at("map").clientWidth) * (window.devicePixelRatio || 1);
    canvas.height = mapped.length * height * (window.devicePixelRatio || 1);
    canvas.style.height = `${mapped.length * height}px`;
    const paint = canvas.getContext("2d");
    const step = canvas.width / longest;
    const tall = canvas.height / mapped.length;
    mapped.forEach(({ row }, place) => {
      paint.fillStyle = empty;
      paint.globalAlpha = 1;
      paint.fillRect(0, place * tall, canvas.width, tall);
      paint.fillStyle = light;
      paint.fillRect(0, place * tall, row.tokens * step, tall - 1);
      paint.fillStyle = dark;
      let token = 1;
      for (const [drafted, kept, emitted] of roundsOf(row)) {
        const share = drafted ? (drafted - kept) / drafted : 0;
        if (share) {
          paint.globalAlpha = 0.15 + 0.85 * share;
          paint.fillRect((token + kept) * step, place * tall, Math.max(1, (emitted - kept) * step), tall - 1);
        }
        token += emitted;
      }
    });
  };
  const mappedAt = (event) => mapped[Math.min(mapped.length - 1, Math.floor(event.offsetY / lineHeight()))];
  at("map").querySelector("canvas").addEventListener("mousemove", (event) => {
    const item = mappedAt(event);
    if (item) event.currentTarget.title = `${item.row.suite} ${name(item.row)}, ${methodName(item.row.method)}: ${item.row.al} tokens per round`;
  });
  at("map").querySelector("canvas").addEventListener("click", (event) => { const item = mappedAt(event); if (item) go(item); });
  document.addEventListener("themed", () => drawMap());
  document.addEventListener("scoped", () => show());
  window.addEventListener("resize", () => drawMap());

  // One answer

  const describeRound = (round, place, said) => {
    const [drafted, kept, emitted, draft, verify] = round;
    const times = verify === undefined ? "" : `; draft ${draft} ms, verify ${verify} ms`;
    return `round ${place + 1}: ${drafted} drafted, ${kept} accepted, ${drafted - kept} rejected, ${emitted} out${times}${said ? `; the draft went on: ${said}` : ""}`;
  };
  const legend = (row, box) => {
    const key = make("div", "key");
    const add = (kind, text, words) => { const span = make("span"); span.append(make("span", kind, text), ` ${words}`); key.append(span); };
    add("t start", "a", "from prefill");
    add("t kept", "a", "drafted and accepted (shade changes with the round)");
    add("t bonus", "a", "chosen by the target");
    add("cut", "−9", "drafted and rejected");
    if (row.rejected) {
      const button = make("button", "said-button", "show what was rejected");
      button.type = "button";
      button.setAttribute("aria-pressed", "false");
      button.addEventListener("click", () => {
        const on = box.classList.toggle("said");
        button.setAttribute("aria-pressed", String(on));
      });
      key.append(button);
    }
    return key;
  };
  const coloured = (pieces, rounds, leaves, rejected) => {
    const pre = make("pre", "text");
    let place = 0;
    const token = (kind) => {
      const span = make("span", `t ${kind}${place === leaves ? " left" : ""}`, pieces[place]);
      if (place === leaves) span.title = "the answer departs from the plain output here";
      place += 1;
      return span;
    };
    if (pieces.length) pre.append(token("start"));
    rounds.forEach(([drafted, kept, emitted, ...times], number) => {
      const span = make("span", `round ${number % 2 ? "odd" : "even"}`);
      const said = rejected ? rejected[number] : "";
      span.title = describeRound([drafted, kept, emitted, ...times], number, said);
      for (let out = 0; out < emitted && place < pieces.length; out += 1) span.append(token(out < kept ? "kept" : "bonus"));
      if (drafted > kept) {
        const cut = make("span", "cut", `−${drafted - kept}`);
        if (said) cut.append(make("s", "", said));
        span.append(cut);
      }
      pre.append(span);
    });
    return pre;
  };
  const strip = (rounds, pre) => {
    const box = make("div", "strip");
    const longest = Math.max(...rounds.map(([drafted]) => drafted), 1);
    rounds.forEach((round, place) => {
      const bar = make("i");
      bar.style.height = `${100 * Math.max(round[0], 1) / longest}%`;
      bar.style.setProperty("--kept-share", `${round[0] ? 100 * round[1] / round[0] : 0}%`);
      bar.title = describeRound(round, place);
      const light = (on) => {
        bar.classList.toggle("on", on);
        const span = pre.querySelectorAll(".round")[place];
        if (span) span.classList.toggle("on", on);
      };
      bar.addEventListener("mouseenter", () => light(true));
      bar.addEventListener("mouseleave", () => light(false));
      box.append(bar);
    });
    return box;
  };
  const behind = (gap, tolerance) =>
    gap === undefined ? "" : ` (${gap} logits behind it; rounding explains up to ${tolerance})`;
  const remarks = (row) => [
    row.finish === "length" ? "cut at the token limit" : "",
    row.answer === undefined ? "" : `answer read as: ${row.answer}`,
    row.expected === undefined ? "" : `expected: ${row.expected}`,
    row.leaves === undefined ? "" : `differs from the plain answer at token ${row.leaves}${behind(row.gap, row.tolerance)}`,
    row.departs === undefined ? "" : `not the model's first choice at token ${row.departs}${behind(row.audit_gap, row.audit_tolerance)}`,
  ].filter(Boolean).join("; ");
  const plainTokens = (pieces, leaves) => {
    const pre = make("pre", "text");
    pre.append(...pieces.map((piece, place) => make("span", `t${place === leaves ? " left" : ""}`, piece)));
    return pre;
  };
  // Marks which part of a text is thinking and which the answer.
  const inParts = (pre, row) => {
    if (!row.thinking) return pre;
    const tokens = [...pre.querySelectorAll(".t")];
    const part = (name) => make("b", "part", name);
    if (!isSplit(row)) {
      pre.replaceChildren(part("thinking"), make("span", "thought", whole(row).slice(0, row.thinking)), part("answer"), whole(row).slice(row.thinking));
      return pre;
    }
    tokens.slice(0, row.thinking).forEach((token) => token.classList.add("thought"));
    tokens[0].before(part("thinking"));
    if (tokens[row.thinking]) tokens[row.thinking].before(part("answer"));
    else pre.append(part("answer"));
    return pre;
  };
  // One method's answer: what was said of it, its rounds, and its text.
  const told = (row) => {
    const box = make("article", "told");
    const figures = [row.speedup === undefined ? "" : `${row.speedup.toFixed(2)}x`, row.ms === undefined ? "" : `${row.ms.toFixed(2)} ms a token`,
      row.al === undefined || !row.counts ? "" : `${row.al.toFixed(2)} tokens per round`];
    const title = make("h4", "", methodName(row.method));
    title.append(make("span", "sub", ` ${figures.filter(Boolean).join(", ")}`));
    box.append(title);
    if (remarks(row)) box.append(make("p", "sub", remarks(row)));
    if (row.error !== undefined) box.append(make("p", "wrong-text", row.error));
    const rounds = row.counts && roundsOf(row);
    const pre = !isSplit(row) ? make("pre", "text", whole(row))
      : rounds ? coloured(piecesOf(row), rounds, row.leaves, row.rejected?.split("\0"))
      : plainTokens(piecesOf(row), row.leaves);
    if (rounds) box.append(strip(rounds, pre));
    box.append(inParts(pre, row));
    return box;
  };

  // Answers typed again as fast as they were made, or as much slower as an eye needs

  const LEAST_MS = 5000;
  const MOST_MS = 20000;
  // When each token was out, in ms; rounds without times of their own are taken as equally long.
  const clock = (row) => {
    const total = (row.ms ?? 0) * Math.max(0, row.tokens - 1);
    if (!row.counts) return Array.from({ length: row.tokens }, (_, place) => row.ms * place);
    const rounds = roundsOf(row);
    const spent = rounds.map(([, , , draft, verify]) => (draft ?? 0) + (verify ?? 0) || 1);
    const all = spent.reduce((sum, one) => sum + one, 0);
    let now = 0;
    return [0, ...rounds.flatMap(([, , emitted], place) => { now += total * spent[place] / all; return Array(emitted).fill(now); })];
  };
  const play = (shown, button) => {
    const runs = shown.filter(({ row }) => row.ms !== undefined && isSplit(row))
      .map(({ row, box }) => ({ tokens: [...box.querySelectorAll("pre.text .t")], times: clock(row), cuts: [...box.querySelectorAll("pre.text .cut")] }));
    if (!runs.length) return;
    const longest = Math.max(...runs.map(({ times }) => times[times.length - 1]), 1e-3);
    const factor = longest < LEAST_MS ? LEAST_MS / longest : longest > MOST_MS ? MOST_MS / longest : 1;
    const pace = factor === 1 ? "at their speed" : factor > 1 ? `${factor.toPrecision(2)} times slower` : `${(1 / factor).toPrecision(2)} times faster`;
    for (const { tokens, cuts } of runs) for (const element of [...tokens, ...cuts]) element.classList.add("later");
    const began = performance.now();
    const token = {};
    button.playing = token;
    const frame = (now) => {
      if (button.playing !== token) return;
      const passed = (now - began) / factor;
      let left = 0;
      for (const run of runs) {
        while (run.tokens.length && (run.times[run.next ?? 0] ?? 0) <= passed) {
          const element = run.tokens.shift();
          element.classList.remove("later");
          const mark = element.nextSibling;
          if (mark && mark.classList && mark.classList.contains("cut")) mark.classList.remove("later");
          run.next = (run.next ?? 0) + 1;
        }
        left += run.tokens.length;
      }
      button.textContent = left ? `playing, ${pace}: ${(passed / 1000).toFixed(2)} s` : `play again (${pace})`;
      if (left) requestAnimationFrame(frame);
      else for (const { cuts } of runs) for (const mark of cuts) mark.classList.remove("later");
    };
    requestAnimationFrame(frame);
  };

  const PLACE = ["bare", "prompt", "turn", "repeat", "settings"];
  const placeOf = (row) => PLACE.map((field) => row[field]).join("\u0000");
  const byPlace = new Map();
  for (const row of rows) byPlace.set(placeOf(row), [...(byPlace.get(placeOf(row)) ?? []), row]);
  const detail = (row) => {
    const tr = make("tr");
    const cell = make("td", "open");
    const box = make("div");
    cell.colSpan = columns.length;
    cell.append(box);
    tr.append(cell);
    if (question(row)) box.append(make("pre", "text question", question(row)));
    const others = byPlace.get(placeOf(row)).filter((other) => other !== row);
    const shown = [row, ...others].map((one) => ({ row: one, box: told(one) }));
    const side = make("div", "side");
    side.append(...shown.map((one) => one.box));
    const tools = [row, ...others].some((one) => one.counts) ? legend([row, ...others].find((one) => one.rejected) ?? row, side) : make("div", "key");
    if (shown.some(({ row: one }) => one.ms !== undefined && isSplit(one))) {
      const button = make("button", "play", "▶ play as measured");
      button.type = "button";
      button.addEventListener("click", () => play(shown, button));
      tools.append(button);
    }
    box.append(tools, side);
    return tr;
  };
  const toggle = (item) => {
    item.open?.remove();
    item.open = item.open ? null : detail(item.row);
    item.made.querySelector("button").setAttribute("aria-expanded", String(Boolean(item.open)));
    if (item.open) item.made.after(item.open);
    current = item;
  };

  // Links to one answer, #a=gsm8k/12/dflash, and the keys j and k from one to the next

  const hasSettings = at("settings").options.length > 2;  // the first is all of them
  const address = ({ bare, prompt, method, turn, repeat, settings: setting }) => {
    const rest = hasSettings ? [turn, repeat, setting] : turn || repeat ? [turn, repeat] : [];
    return `#a=${[bare, prompt, method, ...rest].map(encodeURIComponent).join("/")}`;
  };
  const go = (item) => {
    if (!listed.includes(item)) {
      at("filter").reset();
      at("scope").reset();
      showScope();
    }
    const part = Math.floor(listed.indexOf(item) / IN_PART);
    // Those beside it, too, so that nothing above what is shown grows afterwards.
    for (const number of [part - 1, part, part + 1]) fill(parts[number]);
    if (!item.open) toggle(item);
    current = item;
    item.made.scrollIntoView({ block: "start", behavior: "instant" });
    item.made.querySelector("button").focus({ preventScroll: true });
  };
  const follow = () => {
    const item = items.find(({ row }) => address(row) === location.hash);
    if (item) go(item);
  };
  document.addEventListener("keydown", (event) => {
    if (!["j", "k"].includes(event.key) || event.ctrlKey || event.metaKey || event.altKey) return;
    if (/INPUT|SELECT|TEXTAREA/.test(document.activeElement.tagName)) return;
    const here = listed.indexOf(current);
    const item = listed[here + (event.key === "j" ? 1 : -1)];
    if (!item) return;
    if (here >= 0 && listed[here].open) toggle(listed[here]);
    go(item);
    history.replaceState(null, "", address(item.row));
  });
  window.addEventListener("hashchange", follow);
  show();
  follow();
  at("list").removeAttribute("aria-busy");
};

// They come deflated, in base64; unpacked once, their text is not kept.
const unpacked = async () => {
  const packed = atob(at("data").textContent);
  const bytes = new Uint8Array(packed.length);
  for (let place = 0; place < packed.length; place += 1) bytes[place] = packed.charCodeAt(place);
  at("data").remove();
  return new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"))).json();
};
const showWhy = (text) => {
  at("packed").textContent = `${text} The tables, charts and findings above are whole.`;
  at("packed").hidden = false;
  at("filter").hidden = true;
  at("list").hidden = true;
};
if ("DecompressionStream" in window) {
  unpacked().then(showAnswers, () => showWhy("The answers in this file cannot be unpacked: it may have been cut off or changed on its way."));
} else {
  showWhy("This browser cannot unpack the answers: Chrome and Edge 80, Firefox 113 and Safari 16.4 or newer can.");
}
