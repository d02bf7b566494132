// A click pins a span: what it is, its operators, what it waited for and what waited for it. Search finds spans.
"use strict"
stepsim.parts.push((view) => {
  const {$, data} = stepsim, {plot, range, model} = view
  const args = stepsim.args, spans = args.spans.data, kinds = args.kinds
  const MOST = 12, MARKED = 4000
  const linked = spans.task !== undefined
  let pinned = -1, found = [], place = -1

  const make = (tag, text = "", attributes = {}) => {
    const element = document.createElement(tag)
    element.textContent = text
    for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value)
    return element
  }
  const titleOf = (i) => stepsim.describe("title", spans, i, kinds[spans.kind[i]])
  const short = (i) => {
    const where = data.rows[spans.row[i]], micro = spans.micro[i] >= 0 ? ` ${spans.micro[i]}` : ""
    return `${data.kinds[kinds[spans.kind[i]]].label}${micro}, ${where[0]} ${where[1]}`
  }

  // --- which span lies under the pointer -------------------------------------------------------------------------
  const under = ({time_s, y, per_px}) => {
    const row = stepsim.rowAt(y)
    if (row < 0) return -1
    const near = stepsim.under(args, row, time_s, 3 * per_px)
    const inLane = near.filter((i) => Math.abs(spans.y[i] - y) <= spans.height[i] / 2)
    const away = (i) => Math.max(spans.start[i] - time_s, time_s - spans.end[i], 0)
    const shown = (inLane.length ? inLane : near).filter((i) => !stepsim.hidden.has(kinds[spans.kind[i]]))
    return shown.sort((a, b) => away(a) - away(b))[0] ?? -1
  }

  // --- the panel -------------------------------------------------------------------------------------------------
  const byTask = new Map()
  const followers = new Map()
  if (linked) for (let i = 0; i < spans.start.length; i++) {
    const put = (map, key) => { if (key >= 0) map.has(key) ? map.get(key).push(i) : map.set(key, [i]) }
    put(byTask, spans.task[i])
    put(followers, spans.after[i])
  }
  const jumps = (heading, list, none) => {
    const part = make("div")
    part.append(make("h4", heading))
    if (list.length === 0) { part.append(make("p", none)); return part }
    const ul = make("ul")
    for (const i of list.slice(0, MOST)) {
      const li = make("li"), button = make("button", short(i), {type: "button", "data-span": i})
      button.addEventListener("click", () => show(i))
      li.append(button, ` ${stepsim.seconds(spans.start[i])} – ${stepsim.seconds(spans.end[i])}`)
      ul.append(li)
    }
    part.append(ul)
    if (list.length > MOST) part.append(make("p", `and ${list.length - MOST} more`))
    return part
  }
  const operators = (i) => {
    const length = spans.end[i] - spans.start[i]
    const choices = data.operators?.[spans.detail[i]] ?? []
    if (choices.length === 0) return null
    const [, rows] = choices.reduce((a, b) => Math.abs(b[0] - length) < Math.abs(a[0] - length) ? b : a)
    const part = make("div"), table = make("table"), body = make("tbody")
    part.append(make("h4", "Operators"))
    for (const [name, phase, s] of rows) {
      const tr = make("tr")
      tr.append(make("td", name), make("td", phase), make("td", stepsim.seconds(s), {class: "num"}),
                make("td", stepsim.percent(s / length), {class: "num"}))
      body.append(tr)
    }
    table.append(body); part.append(table)
    return part
  }
  const idleBefore = (i) => {
    let last = 0
    for (let j = 0; j < spans.start.length; j++) {
      if (j !== i && spans.row[j] === spans.row[i] && spans.end[j] <= spans.start[i] + 1e-12) last = Math.max(last, spans.end[j])
    }
    return spans.start[i] - last
  }
  const panel = (i) => {
    const box = $("#pinned")
    box.hidden = i < 0
    if (i < 0) return
    const head = make("header")
    const close = make("button", "×", {type: "button", "aria-label": "Unpin"})
    const zoom = make("button", "Zoom to it", {type: "button"})
    close.addEventListener("click", () => pin(-1))
    zoom.addEventListener("click", () => focus(i))
    head.append(make("h3", titleOf(i)), zoom, close)
    const facts = make("p", stepsim.describe("body", spans, i, kinds[spans.kind[i]]), {class: "facts"})
    const idle = idleBefore(i), parts = [facts, operators(i)]
    if (linked) {
      const waits = spans.after[i] < 0 ? [] : byTask.get(spans.after[i]) ?? []
      const idleText = idle > 1e-9 ? `Nothing runs in this row for ${stepsim.seconds(idle)} before it.` : ""
      const before = jumps("What it waited for: ended when it started", waits, "Nothing: it starts with the step.")
      if (idleText) before.append(make("p", idleText))
      parts.push(before, jumps("What waited for it: started when it ended", followers.get(spans.task[i]) ?? [], "Nothing started when it ended."))
    }
    const columns = make("div", "", {class: "pinned-parts"})
    columns.append(...parts.filter((p) => p))
    box.replaceChildren(head, columns)
  }

  // --- marks on the plot -----------------------------------------------------------------------------------------
  const frames = (list) => ({
    start: list.map((i) => spans.start[i]), end: list.map((i) => spans.end[i]),
    y: list.map((i) => spans.y[i]), height: list.map((i) => spans.height[i]),
  })
  view.marked = () => {
    const inView = (i) => spans.end[i] >= range.start && spans.start[i] <= range.end && !Number.isNaN(spans.y[i])
    model("pinned").data_source.data = frames(pinned < 0 || !inView(pinned) ? [] : [pinned])
    model("found").data_source.data = frames(found.filter(inView).slice(0, MARKED))
  }
  for (const end of ["start", "end"]) range.properties[end].change.connect(() => view.marked())

  const pin = view.pin = (i) => { pinned = i; panel(i); view.marked(); view.told?.() }
  view.pinnedSpan = () => pinned
  const focus = (i) => {
    const length = Math.max(spans.end[i] - spans.start[i], data.end_s * 1e-6)
    view.go(spans.start[i] - length, spans.end[i] + length)
  }
  const show = (i) => {
    view.unhide(spans.row[i])
    if (spans.end[i] > range.end || spans.start[i] < range.start) {
      const half = (range.end - range.start) / 2, middle = (spans.start[i] + spans.end[i]) / 2
      view.go(middle - half, middle + half)
    }
    pin(i)
  }
  view.actions.focus = () => { if (pinned >= 0) focus(pinned) }
  view.keys.f = "focus"

  // --- a click is a press that does not move -----------------------------------------------------------------------
  let down = null
  const area = $("#plots .timeline-plot")
  area.addEventListener("pointerdown", (e) => { down = e.button === 0 ? e : null }, true)
  area.addEventListener("pointerup", (e) => {
    if (!down || Math.hypot(e.clientX - down.clientX, e.clientY - down.clientY) > 4 || e.shiftKey) return
    const where = view.at(e)
    if (where.inside) pin(under(where))
    else if (e.clientX < view.frame().left) view.clickedLabel(where.y)
  }, true)

  // --- search: words in the names of operator, kind, row, stage and micro-batch; all must be there, "stage 3" together
  const field = $("#search"), note = $("#search-note")
  const words = new Map()
  const text = (i) => {
    const key = `${spans.detail[i]},${spans.kind[i]},${spans.row[i]}`
    if (!words.has(key)) {
      const inside = (data.operators?.[spans.detail[i]] ?? []).flatMap(([, rows]) => rows.map(([name]) => name))
      words.set(key, [titleOf(i), ...data.rows[spans.row[i]].slice(0, 2), ...inside].join(" ").toLowerCase())
    }
    return `${words.get(key)} stage ${spans.stage[i]} ${data.item} ${spans.micro[i]} `
  }
  const search = view.search = () => {
    const asked = field.value.trim().toLowerCase()
    place = -1
    const pieces = [...asked.matchAll(/[^\s\d]\S*\s+\d+|\S+/g)].map(([w]) => /\d$/.test(w) ? `${w.replace(/\s+/, " ")} ` : w)
    const has = (i) => { const t = text(i); return pieces.every((w) => t.includes(w)) }
    found = asked ? Array.from(spans.start.keys()).filter(has).sort((a, b) => spans.start[a] - spans.start[b]) : []
    note.textContent = asked ? found.length ? `${found.length.toLocaleString("en")} found, Enter for the next` : "none found" : ""
    view.marked(); view.told?.()
  }
  field.addEventListener("input", search)
  field.addEventListener("keydown", (event) => {
    if (event.key === "Escape") { field.value = ""; search(); field.blur() }
    if (event.key !== "Enter" || found.length === 0) return
    place = (place + (event.shiftKey ? found.length - 1 : 1)) % found.length
    show(found[place])
    note.textContent = `${place + 1} of ${found.length.toLocaleString("en")}`
  })
  view.actions.search = () => { field.focus(); field.select() }
  view.keys["/"] = "search"
  const cleared = view.clear = () => { pin(-1); view.measure?.(null) }
  view.actions.clear = cleared
  view.keys.Escape = "clear"
})
