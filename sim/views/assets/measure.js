// A range of time, dragged with Shift (or without, where dragging measures): what runs in it, by kind and by track.
"use strict"
stepsim.parts.push((view) => {
  const {$, all, data} = stepsim, {plot, range, model} = view
  const args = stepsim.args, spans = args.spans.data, kinds = args.kinds
  const shade = model("range")
  let chosen = null, from = null, measuring = false

  // Total length of the union of intervals sorted by start.
  const union = (intervals) => {
    let length = 0, reach = -Infinity
    for (const [a, b] of intervals) { length += Math.max(0, b - Math.max(a, reach)); reach = Math.max(reach, b) }
    return length
  }
  const cut = (i) => [Math.max(spans.start[i], chosen[0]), Math.min(spans.end[i], chosen[1])]

  const summary = () => {
    const byKind = new Map(), tracks = new Map()
    for (let i = 0; i < spans.start.length; i++) {
      if (spans.end[i] <= chosen[0] || spans.start[i] >= chosen[1]) continue
      const [name, stream] = data.rows[spans.row[i]], [a, b] = cut(i), kind = kinds[spans.kind[i]]
      if (!tracks.has(name)) tracks.set(name, {compute: [], other: []})
      if (stream === "compute") tracks.get(name).compute.push([a, b])
      else if (stream !== "recv") tracks.get(name).other.push([a, b])
      const sum = byKind.get(kind) ?? {seconds: 0, spans: 0, bytes: 0}
      const weight = data.sizes?.[name] ?? 1
      sum.seconds += (b - a) * weight
      sum.spans++
      sum.bytes += data.details[spans.detail[i]][1] * (b - a) / Math.max(spans.end[i] - spans.start[i], 1e-30)
      byKind.set(kind, sum)
    }
    const lines = data.bands.map(([name]) => {
      const {compute, other} = tracks.get(name) ?? {compute: [], other: []}
      const order = (x) => x.sort((p, q) => p[0] - q[0])
      const busy = union(order(compute)), either = union(order([...compute, ...other]))
      return {name, busy, exposed: either - busy, weight: data.sizes?.[name] ?? 1}
    })
    return {byKind, lines}
  }

  const cells = (tag, texts) => `<tr>${texts.map((t, i) => `<${tag}${i ? ' class="num"' : ""}></${tag}>`).join("")}</tr>`
  const table = (head, rows) => {
    const element = document.createElement("table")
    element.innerHTML = `<thead>${cells("th", head)}</thead><tbody>${rows.map((r) => cells("td", r)).join("")}</tbody>`
    const texts = [head, ...rows]
    ;[...element.rows].forEach((row, i) => [...row.cells].forEach((cell, j) => { cell.textContent = texts[i][j] }))
    return element
  }

  const draw = () => {
    const box = $("#measured")
    box.hidden = chosen === null
    shade.visible = chosen !== null
    if (chosen === null) return
    shade.setv({left: chosen[0], right: chosen[1]})
    const length = chosen[1] - chosen[0], {byKind, lines} = summary()
    const ranks = lines.reduce((n, l) => n + l.weight, 0) || 1
    const mean = (key) => lines.reduce((n, l) => n + l[key] * l.weight, 0) / ranks
    const kindRows = [...byKind].sort((a, b) => b[1].seconds - a[1].seconds).map(([kind, sum]) => [
      data.kinds[kind].label, stepsim.seconds(sum.seconds / ranks), stepsim.percent(sum.seconds / ranks / length),
      String(sum.spans), sum.bytes ? stepsim.bytes(sum.bytes) : "",
    ])
    const lineRows = lines.map((l) => [l.name, stepsim.percent(l.busy / length), stepsim.percent(l.exposed / length),
                                       stepsim.percent(1 - (l.busy + l.exposed) / length)])
    const head = document.createElement("header"), title = document.createElement("h3")
    title.textContent = `${stepsim.seconds(length)}, from ${stepsim.seconds(chosen[0])}: computing `
      + `${stepsim.percent(mean("busy") / length)}, exposed communication ${stepsim.percent(mean("exposed") / length)}`
    head.append(title)
    for (const [text, does] of [["Zoom to it", () => view.go(...chosen)], ["×", () => measure(null)]]) {
      const button = document.createElement("button")
      button.type = "button"; button.textContent = text
      if (text === "×") button.setAttribute("aria-label", "Close")
      button.addEventListener("click", does)
      head.append(button)
    }
    const parts = document.createElement("div")
    parts.className = "pinned-parts"
    parts.append(table(["Kind", "mean rank", "of the range", "spans", "bytes"], kindRows),
                 table(["Ranks", "computing", "exposed", "idle"], lineRows))
    box.replaceChildren(head, parts)
  }

  const measure = view.measure = (range_s) => {
    chosen = range_s && range_s[1] > range_s[0] ? range_s : null
    draw(); view.told?.()
  }
  view.measured = () => chosen

  const area = $("#plots .timeline-plot")
  const bounded = (time_s) => Math.min(Math.max(time_s, 0), data.end_s)
  area.addEventListener("pointerdown", (e) => {
    const where = view.at(e)
    if (e.button !== 0 || !where.inside || !(e.shiftKey || measuring)) return
    e.stopPropagation()
    from = bounded(where.time_s)
    area.setPointerCapture(e.pointerId)
  }, true)
  area.addEventListener("pointermove", (e) => {
    if (from === null) return
    e.stopPropagation()
    const to = bounded(view.at(e).time_s)
    shade.setv({left: Math.min(from, to), right: Math.max(from, to)})
    shade.visible = true
  }, true)
  area.addEventListener("pointerup", (e) => {
    if (from === null) return
    const to = bounded(view.at(e).time_s), least = 4 * view.at(e).per_px
    e.stopPropagation()
    if (Math.abs(to - from) > least) measure([Math.min(from, to), Math.max(from, to)])
    else draw()
    from = null
  }, true)

  const mode = (on) => {
    measuring = on
    for (const button of all("button[data-drag]")) {
      button.setAttribute("aria-pressed", String((button.dataset.drag === "measure") === on))
    }
  }
  for (const button of all("button[data-drag]")) button.addEventListener("click", () => mode(button.dataset.drag === "measure"))
  view.actions.mode = () => mode(!measuring)
  view.keys.m = "mode"
})
