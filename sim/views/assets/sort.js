for (const button of document.querySelectorAll("th button")) button.addEventListener("click", () => {
  const head = button.closest("th"), body = head.closest("table").tBodies[0], at = head.cellIndex
  const up = head.getAttribute("aria-sort") !== "ascending"
  const value = (row) => row.cells[at].dataset.value
  const order = (a, b) => value(a).localeCompare(value(b), "en", {numeric: true})
  for (const other of head.parentNode.cells) other.removeAttribute("aria-sort")
  head.setAttribute("aria-sort", up ? "ascending" : "descending")
  body.append(...[...body.rows].sort((a, b) => up ? order(a, b) : order(b, a)))
})
