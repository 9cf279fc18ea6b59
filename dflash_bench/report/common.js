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

// The same choice holds for tables, charts and answers.

const scope = { suite: "", method: "", settings: "" };
const inScope = (suite, method, settings) =>
  (!scope.suite || scope.suite === suite) && (!scope.method || scope.method === method) &&
  (!scope.settings || scope.settings === settings);
const showScope = () => {
  for (const id of Object.keys(scope)) scope[id] = at(id).value;
  for (const element of document.querySelectorAll("[data-method]")) {
    const { suite, method, settings } = element.dataset;
    element.hidden = !inScope(suite, method, settings);
  }
  for (const group of document.querySelectorAll("tbody:has([data-method])")) {
    group.hidden = !group.querySelector("[data-method]:not([hidden])");
  }
  // Drawings of the whole run would contradict what is chosen.
  const narrowed = Object.values(scope).some(Boolean);
  for (const element of document.querySelectorAll("[data-whole]")) element.hidden = narrowed;
  for (const element of document.querySelectorAll("[data-narrowed]")) element.hidden = !narrowed;
  document.dispatchEvent(new Event("scoped"));
};
at("scope").hidden = !at("scope").querySelector("select:not([hidden])");
at("scope").addEventListener("input", showScope);
