"use strict";
(() => {
  const rows = [...document.querySelectorAll("tbody tr")];
  const selects = [...document.querySelectorAll("select[data-filter]")];
  const find = document.getElementById("find");
  const show = () => {
    const words = find.value.toLowerCase();
    let count = 0;
    for (const row of rows) {
      const fits = selects.every(({ value, dataset }) => !value || row.dataset[dataset.filter] === value) &&
        (!words || row.textContent.toLowerCase().includes(words));
      row.hidden = !fits;
      count += fits;
    }
    document.getElementById("count").textContent = `${count} of ${rows.length}`;
  };
  const form = document.getElementById("filter");
  form.addEventListener("input", show);
  form.addEventListener("submit", (event) => event.preventDefault());
  show();
})();
