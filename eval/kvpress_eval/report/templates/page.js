"use strict";
// Tables with the class "sortable": a click on a heading sorts, best first, another one turns the order around.
for (const table of document.querySelectorAll("table.sortable")) {
  const headings = [...table.tHead.rows[0].cells];
  headings.forEach((heading, column) => {
    const button = document.createElement("button");
    button.append(...heading.childNodes);
    heading.append(button);
    button.addEventListener("click", () => {
      const order = heading.getAttribute("aria-sort") === "descending" ? "ascending" : "descending";
      headings.forEach((other) => other.removeAttribute("aria-sort"));
      heading.setAttribute("aria-sort", order);
      const sign = order === "ascending" ? 1 : -1;
      const key = (row) => row.cells[column].dataset.v ?? "";
      const compare = (a, b) =>
        // What was not measured stays below everything in both orders.
        key(a) === "" || key(b) === "" ? (key(a) === "") - (key(b) === "")
          : sign * (isNaN(key(a)) || isNaN(key(b)) ? key(a).localeCompare(key(b)) : key(a) - key(b));
      table.tBodies[0].append(...[...table.tBodies[0].rows].sort(compare));
    });
  });
}
// Pairs: a choice of one press, or of two, leaves the rows of these.
for (const pairs of document.querySelectorAll("details.pairs")) {
  const rows = [...pairs.querySelectorAll("tbody tr")];
  const names = (row) => [row.cells[0].dataset.v, row.cells[1].dataset.v];
  const presses = [...new Set(rows.flatMap(names))];
  const bar = document.createElement("div");
  bar.className = "choose";
  const choices = ["compare", "with"].map((word) => {
    const label = document.createElement("label");
    const choice = document.createElement("select");
    choice.add(new Option("any press", ""));
    presses.forEach((press) => choice.add(new Option(press, press)));
    choice.addEventListener("change", () => {
      const chosen = choices.map((other) => other.value).filter(Boolean);
      rows.forEach((row) => (row.hidden = !chosen.every((press) => names(row).includes(press))));
    });
    label.append(`${word} `, choice);
    bar.append(label);
    return choice;
  });
  pairs.querySelector("summary").after(bar);
}
// Maps of budgets: a head, a layer or "all" chooses whose tokens the text beside it shows.
for (const view of document.querySelectorAll(".kept")) {
  const tokens = [...view.querySelectorAll(".text span")];
  const cells = [...view.querySelectorAll("[data-kept]")];
  if (!tokens.length || !cells.length) continue;
  const show = (button, chosen, label) => {
    tokens.forEach((token, n) => {
      const held = chosen.filter((cell) => (parseInt(cell.dataset.kept[n >> 2], 16) >> (3 - (n & 3))) & 1).length;
      token.dataset.k = Math.ceil((SHADES * held) / chosen.length);
    });
    view.querySelectorAll("button").forEach((other) => other.setAttribute("aria-pressed", other === button));
    view.querySelector("output").textContent = label;
  };
  const offer = (place, chosen, label) => {
    const button = document.createElement("button");
    button.append(...place.childNodes);
    button.title = `show ${label}`;
    if (place.dataset.kept) button.setAttribute("aria-label", `${label}: ${button.textContent}% kept`);
    button.addEventListener("click", () => show(button, chosen, label));
    place.append(button);
    return button;
  };
  offer(view.querySelector("[data-all]"), cells, "all layers and heads").setAttribute("aria-pressed", true);
  for (const row of view.querySelectorAll("tbody tr")) {
    const own = cells.filter((cell) => row.contains(cell));
    if (!own.length) continue;
    const layer = row.cells[0].textContent;
    offer(row.cells[0], own, `${layer}, all heads`);
    own.forEach((cell, head) => offer(cell, [cell], `${layer}, head ${head}`));
  }
}
