"use strict";
(() => {
  const { rows, texts, prompts } = JSON.parse(document.getElementById("data").textContent);
  const at = (id) => document.getElementById(id);

  // What comes from a run is only ever set as text.
  const make = (tag, name, text) => {
    const element = document.createElement(tag);
    if (name) element.className = name;
    if (text !== undefined) element.textContent = text;
    return element;
  };

  // Theme

  const themes = ["system", "light", "dark"];
  let theme = "system";
  try { theme = localStorage.getItem("dflash-bench-theme") || theme; } catch { /* a file may have no storage */ }
  const showTheme = () => {
    if (theme === "system") delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = theme;
    at("theme").textContent = `theme: ${theme}`;
  };
  at("theme").addEventListener("click", () => {
    theme = themes[(themes.indexOf(theme) + 1) % themes.length];
    try { localStorage.setItem("dflash-bench-theme", theme); } catch { /* as above */ }
    showTheme();
  });
  if (!themes.includes(theme)) theme = "system";
  showTheme();

  // The list

  const number = (digits) => (value) => value === undefined ? "–" : value.toFixed(digits);
  const right = (row) => row.passed === undefined ? "–" : row.passed ? "right" : "wrong";
  const same = (row) => row.error !== undefined ? "failed" : (row.exact || "–").replace("_", " ");
  const name = (row) => row.prompt + (row.turn ? ` turn ${row.turn + 1}` : "") + (row.repeat ? ` repeat ${row.repeat + 1}` : "");
  const columns = [
    { head: "prompt", key: name, name: true },
    { head: "suite", key: (row) => row.suite, name: true, spare: true },
    { head: "method", key: (row) => row.method, name: true },
    { head: "tokens", key: (row) => row.tokens, show: number(0), spare: true },
    { head: "rounds", key: (row) => row.rounds, show: number(0), spare: true },
    { head: "al", title: "mean over rounds of a_i + 1", key: (row) => row.al, show: number(2) },
    { head: "ms / token", key: (row) => row.ms, show: number(2), spare: true },
    { head: "speed-up", key: (row) => row.speedup, show: number(2) },
    { head: "exact", key: same, narrow: true },
    { head: "answer", key: right },
  ];
  const outcomes = {
    "right": (row) => row.passed === true,
    "wrong": (row) => row.passed === false,
    "not exact": (row) => [row.exact, row.audit].some((verdict) => verdict !== undefined && verdict !== "exact"),
    "cut at the limit": (row) => row.finish === "length",
    "failed": (row) => row.error !== undefined,
    "slower than plain": (row) => row.speedup < 1,
  };
  const whole = (row) => { const text = texts[row.text]; return Array.isArray(text) ? text.join("") : text; };

  const question = (row) => prompts[row.asked] ?? "";

  const mood = (text) => ({ right: "fine", exact: "fine", wrong: "bad", mismatch: "bad", failed: "bad" })[text] || "";
  const line = (row) => {
    const tr = make("tr", "row");
    for (const [place, column] of columns.entries()) {
      const value = column.key(row);
      const label = column.show ? column.show(value) : value;
      const td = make("td", [column.name && "name", column.spare && "spare", column.narrow && "narrow"].filter(Boolean).join(" "));
      if (place === 0) {
        const button = make("button", "", label);
        button.type = "button";
        button.setAttribute("aria-expanded", "false");
        td.append(button);
      } else {
        td.append(make("span", place < 3 ? "" : mood(label), label));
      }
      tr.append(td);
    }
    return tr;
  };
  const items = rows.map((row) => ({ row, tr: line(row), open: null }));
  const body = document.querySelector("#list tbody");
  const heads = document.querySelector("#list thead tr");
  let sorted = { place: -1, up: true };

  const compare = (a, b) => {
    if (a === b) return 0;
    if (a === undefined) return 1;
    if (b === undefined) return -1;
    return typeof a === "number" ? a - b : String(a).localeCompare(String(b), "en", { numeric: true });
  };
  const show = () => {
    const words = at("find").value.toLowerCase();
    const fits = ({ row }) =>
      (!at("suite").value || row.suite === at("suite").value) &&
      (!at("method").value || row.method === at("method").value) &&
      (!at("outcome").value || outcomes[at("outcome").value](row)) &&
      (!words || name(row).toLowerCase().includes(words) || whole(row).toLowerCase().includes(words) || question(row).toLowerCase().includes(words));
    const visibleItems = items.filter(fits);
    if (sorted.place >= 0) {
      const { key } = columns[sorted.place];
      // What is not there comes last both ways.
      visibleItems.sort((a, b) => {
        const [x, y] = [key(a.row), key(b.row)];
        return compare(x, y) * (sorted.up || x === undefined || y === undefined ? 1 : -1);
      });
    }
    body.replaceChildren(...visibleItems.flatMap(({ tr, open }) => open ? [tr, open] : [tr]));
    at("count").textContent = `${visibleItems.length} of ${items.length}`;
  };

  columns.forEach((column, place) => {
    const th = make("th", [column.name && "name", column.spare && "spare", column.narrow && "narrow"].filter(Boolean).join(" "));
    const button = make("button", "", column.head);
    button.type = "button";
    if (column.title) button.title = column.title;
    th.setAttribute("aria-sort", "none");
    th.append(button);
    button.addEventListener("click", () => {
      sorted = { place, up: sorted.place === place ? !sorted.up : true };
      for (const [other, head] of [...heads.children].entries()) {
        head.setAttribute("aria-sort", other !== place ? "none" : sorted.up ? "ascending" : "descending");
      }
      show();
    });
    heads.append(th);
  });
  const offer = (id, names) => names.forEach((value) => {
    const option = make("option", "", value);
    option.value = value;
    at(id).append(option);
  });
  offer("suite", [...new Set(rows.map((row) => row.suite))]);
  offer("method", [...new Set(rows.map((row) => row.method))]);
  offer("outcome", Object.keys(outcomes).filter((value) => rows.some(outcomes[value])));
  at("filter").addEventListener("input", show);
  at("filter").addEventListener("submit", (event) => event.preventDefault());

  // One answer

  const describeRound = (round, place, said) => {
    const [drafted, kept, emitted, draft, verify] = round;
    const times = verify === null || verify === undefined ? "" : `; draft ${draft} ms, verify ${verify} ms`;
    return `round ${place + 1}: ${drafted} drafted, ${kept} accepted, ${drafted - kept} rejected, ${emitted} out${times}${said ? `; the draft went on: ${said}` : ""}`;
  };
  const legend = (row, pre) => {
    const key = make("div", "key");
    const add = (kind, text, words) => { const span = make("span"); span.append(make("span", kind, text), ` ${words}`); key.append(span); };
    add("t start", "a", "from prefill");
    add("t kept", "a", "drafted and accepted (shade changes with the round)");
    add("t bonus", "a", "chosen by the target");
    add("cut", "−9", "drafted and rejected");
    if (row.rejected) {
      const button = make("button", "", "show what was rejected");
      button.type = "button";
      button.setAttribute("aria-pressed", "false");
      button.addEventListener("click", () => {
        const on = pre.classList.toggle("said");
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
  const detail = (row) => {
    const tr = make("tr");
    const cell = make("td", "open");
    const box = make("div");
    cell.colSpan = columns.length;
    cell.append(box);
    tr.append(cell);
    const about = [
      row.finish === "length" ? "cut at the token limit" : "",
      row.answer === undefined ? "" : `answer read as: ${row.answer}`,
      row.expected === undefined ? "" : `expected: ${row.expected}`,
      row.leaves === undefined ? "" : `differs from the plain answer at token ${row.leaves}${behind(row.gap, row.tolerance)}`,
      row.departs === undefined ? "" : `not the model's first choice at token ${row.departs}${behind(row.audit_gap, row.audit_tolerance)}`,
    ];
    if (about.some(Boolean)) box.append(make("p", "sub", about.filter(Boolean).join("; ")));
    if (row.error !== undefined) box.append(make("p", "wrong-text", row.error));
    if (question(row)) box.append(make("pre", "text question", question(row)));
    const text = texts[row.text];
    if (Array.isArray(text) && row.by_round) {
      const pre = coloured(text, row.by_round, row.leaves, row.rejected);
      box.append(legend(row, pre), strip(row.by_round, pre), pre);
    } else {
      const pre = make("pre", "text", whole(row));
      if (row.by_round) box.append(strip(row.by_round, pre));
      box.append(pre);
    }
    return tr;
  };
  const toggle = (item) => {
    item.open = item.open ? null : detail(item.row);
    item.tr.querySelector("button").setAttribute("aria-expanded", String(Boolean(item.open)));
    show();
  };
  // The button's click reaches the row, so one listener serves both.
  for (const item of items) item.tr.addEventListener("click", () => toggle(item));
  show();

  // Links to one answer, #a=gsm8k/12/dflash, and the keys j and k from one to the next

  const address = ({ bare, prompt, method, turn, repeat }) =>
    `#a=${[bare, prompt, method, ...(turn || repeat ? [turn, repeat] : [])].map(encodeURIComponent).join("/")}`;
  const go = (item) => {
    if (!item.tr.isConnected) {
      at("filter").reset();
      show();
    }
    if (!item.open) toggle(item);
    item.tr.scrollIntoView({ block: "start" });
    item.tr.querySelector("button").focus({ preventScroll: true });
  };
  const follow = () => {
    const item = items.find(({ row }) => address(row) === location.hash);
    if (item) go(item);
  };
  for (const item of items) {
    item.tr.addEventListener("click", () => {
      if (item.open) history.replaceState(null, "", address(item.row));
    });
  }
  document.addEventListener("keydown", (event) => {
    if (!["j", "k"].includes(event.key) || event.ctrlKey || event.metaKey || event.altKey) return;
    if (/INPUT|SELECT|TEXTAREA/.test(document.activeElement.tagName)) return;
    const shown = [...body.querySelectorAll("tr.row")];
    const here = shown.findIndex((tr) => tr.contains(document.activeElement));
    const next = shown[here + (event.key === "j" ? 1 : -1)];
    if (!next) return;
    const before = items.find(({ tr }) => tr === shown[here]);
    if (before && before.open) toggle(before);
    const item = items.find(({ tr }) => tr === next);
    go(item);
    history.replaceState(null, "", address(item.row));
  });
  window.addEventListener("hashchange", follow);
  follow();
})();
