"use strict";
document.documentElement.classList.add("scripted");

// -- copy buttons ---------------------------------------------------------------------------------------------------

function copyByHand(text) {
  const area = document.createElement("textarea");
  area.value = text;
  area.style.position = "fixed";
  document.body.append(area);
  area.select();
  const done = document.execCommand("copy");
  area.remove();
  return done;
}

async function copy(button) {
  const text = button.dataset.copy;
  let done = true;
  try { await navigator.clipboard.writeText(text); } catch { done = copyByHand(text); }
  button.textContent = done ? "copied" : "select it";
  setTimeout(() => { button.textContent = "copy"; }, 1500);
}

for (const button of document.querySelectorAll("button.copy")) button.addEventListener("click", () => copy(button));

// -- filters --------------------------------------------------------------------------------------------------------

for (const filter of document.querySelectorAll(".filter")) {
  const target = filter.dataset.table;
  const tables = target.startsWith(".") ? document.querySelectorAll(target) : [document.getElementById(target)];
  const rows = [...tables].flatMap((table) => [...table.tBodies[0].rows]);
  const texts = rows.map((row) => row.textContent.toLowerCase());
  const search = filter.querySelector("input[type=search]"), only = filter.querySelector("input[type=checkbox]");
  const apply = () => {
    const words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
    let shown = 0;
    rows.forEach((row, index) => {
      const fits = words.every((word) => texts[index].includes(word));
      row.hidden = !fits || (only !== null && only.checked && !row.classList.contains("affected"));
      shown += row.hidden ? 0 : 1;
    });
    filter.querySelector("output").textContent = shown === rows.length ? `${shown} rows` : `${shown} of ${rows.length} rows`;
  };
  search.addEventListener("input", apply);
  if (only !== null) only.addEventListener("change", apply);
  apply();
}
