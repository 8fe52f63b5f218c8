// Sort tables by their headers, open what a link points to, open everything for print. The page works without it.
for (const table of document.querySelectorAll("table.sortable")) {
  [...table.tHead.rows[0].cells].forEach((head, column) => {
    if (!head.textContent.trim() || head.dataset.fixed !== undefined) return;
    const button = document.createElement("button");
    button.type = "button";
    button.append(...head.childNodes);
    head.append(button);
    button.addEventListener("click", () => {
      const body = table.tBodies[0];
      const value = (row) => row.cells[column].dataset.v ?? row.cells[column].textContent.trim();
      const numeric = [...body.rows].every((row) => row.cells[column].dataset.v !== undefined);
      const was = head.getAttribute("aria-sort");
      const order = was ? (was === "ascending" ? "descending" : "ascending") : numeric ? "descending" : "ascending";
      const sign = order === "ascending" ? 1 : -1;
      const number = (row) => (isNaN(value(row)) ? -Infinity : Number(value(row)));
      const compare = (a, b) => (numeric ? number(a) - number(b) || 0 : value(a).localeCompare(value(b), undefined, { numeric: true }));
      body.append(...[...body.rows].sort((a, b) => sign * compare(a, b)));
      for (const other of table.tHead.rows[0].cells) other.removeAttribute("aria-sort");
      head.setAttribute("aria-sort", order);
    });
  });
}
const open = () => {
  let target = null;
  try { target = document.getElementById(decodeURIComponent(location.hash.slice(1))); } catch { return; }
  for (let node = target; node; node = node.parentElement) if (node.tagName === "DETAILS") node.open = true;
  if (target?.tagName === "ARTICLE") target.querySelector("details").open = true;
  target?.scrollIntoView();
};
addEventListener("hashchange", open);
addEventListener("beforeprint", () => document.querySelectorAll("details.print").forEach((d) => (d.open = true)));
if (location.hash) open();
