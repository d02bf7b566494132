// Tables: a click on a head sorts, a button copies the table as CSV, another a row's scenario as YAML or its command; a
// line says how many columns and rows are out of sight.
"use strict";
(() => {
  window.stepsim ??= {}
  stepsim.copy = async (text, button) => {
    try { await navigator.clipboard.writeText(text) } catch {
      const field = document.createElement("textarea")
      field.value = text
      document.body.append(field)
      field.select()
      document.execCommand("copy")
      field.remove()
    }
    if (!button) return
    const was = button.textContent
    button.textContent = "Copied"
    setTimeout(() => { button.textContent = was }, 1200)
  }

  const plain = (text) => text.trim().replace(/\s+/g, " ").replace(/^−(?=\d)/, "-")  // the sign that programs read
  const value = (row, at) => row.cells[at]?.dataset.value ?? plain(row.cells[at]?.textContent ?? "")
  const units = {"µs": 1e-6, ms: 1e-3, s: 1, min: 60, h: 3600, days: 86400, B: 1, KiB: 2 ** 10, MiB: 2 ** 20, GiB: 2 ** 30, TiB: 2 ** 40,
                 "%": 0.01}
  const number = (text) => {
    const [, digits, unit] = /^([+-]?[\d,]*\.?\d+(?:e[+-]?\d+)?)\s*([^\d\s]*)/.exec(text) ?? []
    return digits === undefined ? NaN : Number(digits.replaceAll(",", "")) * (units[unit] ?? 1)
  }
  const order = (a, b) => {
    const x = number(a), y = number(b)
    return Number.isNaN(x) || Number.isNaN(y) ? a.localeCompare(b, "en", {numeric: true}) : x - y
  }
  const sort = (head) => {
    const body = head.closest("table").tBodies[0], at = head.cellIndex
    const up = head.getAttribute("aria-sort") !== "ascending"
    for (const other of head.parentNode.cells) other.removeAttribute("aria-sort")
    head.setAttribute("aria-sort", up ? "ascending" : "descending")
    const sorted = [...body.rows].sort((a, b) => up ? order(value(a, at), value(b, at)) : order(value(b, at), value(a, at)))
    body.append(...sorted)
  }

  const quoted = (text) => /[",\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text
  stepsim.csv = (table) => [...table.rows].map((row) => [...row.cells].filter((cell) => !cell.hasAttribute("data-tools"))
    .map((cell) => quoted(plain(cell.dataset.value ?? cell.textContent))).join(",")).join("\n") + "\n"

  const beyond = (cells, side, edge) => [...cells].filter((cell) => cell.getBoundingClientRect()[side] > edge + 1).length
  const counted = (n, one) => `${n} more ${one}${n > 1 ? "s" : ""}`
  const hintOf = (box, table) => {
    const hint = document.createElement("p")
    hint.className = "hint more noprint"
    const look = () => {
      const edges = box.getBoundingClientRect(), first = table.rows[0]
      const columns = first ? beyond(first.cells, "right", edges.left + box.clientWidth) : 0
      const rows = beyond(table.rows, "bottom", edges.top + box.clientHeight)
      hint.textContent = [columns && `${counted(columns, "column")} to the right →`, rows && `${counted(rows, "row")} below ↓`]
        .filter(Boolean).join(", ") + (columns || rows ? ": scroll" : "")
      const scrolls = box.scrollWidth > box.clientWidth + 1 || box.scrollHeight > box.clientHeight + 1
      if (scrolls) box.tabIndex = 0  // for arrow keys
      else box.removeAttribute("tabindex")
    }
    box.addEventListener("scroll", look, {passive: true})
    new ResizeObserver(look).observe(box)
    box.before(hint)
  }

  for (const table of document.querySelectorAll("main table")) {
    if (!table.closest(".scroll")) {
      const box = document.createElement("div")
      box.className = "scroll"
      table.replaceWith(box)
      box.append(table)
    }
    const heads = [...(table.tHead?.rows[0]?.cells ?? [])].filter((h) => h.textContent.trim() && !h.hasAttribute("data-tools"))
    const several = table.tBodies[0]?.rows.length > 1
    for (const head of heads.filter((h) => several || h.querySelector("button"))) {
      if (!head.querySelector("button")) {
        const button = document.createElement("button")
        button.type = "button"
        button.append(...head.childNodes)
        head.append(button)
      }
      head.querySelector("button").addEventListener("click", () => sort(head))
    }
    const box = table.closest(".scroll"), button = document.createElement("button")
    button.type = "button"
    button.className = "copy-csv noprint"
    button.textContent = "Copy CSV"
    button.addEventListener("click", () => stepsim.copy(stepsim.csv(table), button))
    box.after(button)
    hintOf(box, table)
  }
  for (const button of document.querySelectorAll("button[data-copy]")) {
    button.addEventListener("click", () => stepsim.copy(button.dataset.copy, button))
  }
})()
