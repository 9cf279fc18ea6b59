"use strict";
// What every page of a run has: its theme, and the choice of what it shows.

const at = (id) => document.getElementById(id);

// What comes from a run is only ever set as text.
const make = (tag, name, text) => {
  const element = document.createElement(tag);
  if (name) element.className = name;
  if (text !== undefined) element.textContent = text;
  return element;
};
// A name may go on in a new line behind its marks, and not within a word.
const breakable = (element, text) => {
  element.append(...text.split(/(?<=[/._:,=@-])(?=\p{L}|\p{N})/u).flatMap((part) => [part, make("wbr")]));
  return element;
};

{
  const themes = ["system", "light", "dark"];
  let theme = "system";
  try { theme = localStorage.getItem("dflash-bench-theme") || theme; } catch { /* a file may have no storage */ }
  const showTheme = () => {
    if (theme === "system") delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = theme;
    at("theme").textContent = `theme: ${theme}`;
    document.dispatchEvent(new Event("themed"));
  };
  at("theme").addEventListener("click", () => {
    theme = themes[(themes.indexOf(theme) + 1) % themes.length];
    try { localStorage.setItem("dflash-bench-theme", theme); } catch { /* as above */ }
    showTheme();
  });
  if (!themes.includes(theme)) theme = "system";
  showTheme();
}

// A method as people read it: data holds plain decoding's label.
const methodName = (method) => [...at("method").options].find(({ value }) => value === method)?.text || method;

// The same choice holds for tables, charts and answers.

const scope = { suite: "", method: "", settings: "" };
// What says nothing of its suite, method or settings is of any; an empty one is of several.
const inScope = (suite, method, settings) =>
  Object.entries({ suite, method, settings }).every(([id, own]) => !scope[id] || own === undefined || scope[id] === own);
const showScope = () => {
  for (const id of Object.keys(scope)) scope[id] = at(id).value;
  for (const element of document.querySelectorAll("[data-suite], [data-method]")) {
    const { suite, method, settings } = element.dataset;
    // Parts of a drawing have no property of that name.
    element.toggleAttribute("hidden", !inScope(suite, method, settings));
  }
  for (const group of document.querySelectorAll("tbody:has([data-method])")) {
    group.hidden = !group.querySelector("[data-method]:not([hidden])");
  }
  document.dispatchEvent(new Event("scoped"));
};
at("scope").hidden = !at("scope").querySelector("select:not([hidden])");
at("scope").addEventListener("input", showScope);
