// Which rows of the timeline are shown: tracks collapsed to their first row, ranks chosen by number or name, rows in
// which next to nothing runs left out. What is shown moves together; of very many ranks, whose rows were made thin, a few
// that were chosen get rows of the usual height.
"use strict"
stepsim.parts.push((view) => {
  const {$, data} = stepsim, {plot, model} = view
  const NEXT_TO_NOTHING = 1e-3  // of the step
  const ROOM = 1500, PAD = 4  // pixels: as in sim/views/rows.py
  const collapsed = new Set()
  const spans = stepsim.args.spans.data
  const y0 = Float64Array.from(spans.y), height0 = Float64Array.from(spans.height)
  const far = model("far")?.data_source, far0 = far && {y: Float64Array.from(far.data.y), dh: Float64Array.from(far.data.dh)}
  const critical = model("critical")?.data_source
  const critical0 = critical && {y: Float64Array.from(critical.data.y), height: Float64Array.from(critical.data.height)}
  const busy = data.rows.map(() => 0)
  for (let i = 0; i < spans.start.length; i++) busy[spans.row[i]] += spans.end[i] - spans.start[i]
  const tracks = data.bands.map(([name, top]) => ({name, top, rows: []}))
  {
    let track = 0
    data.rows.forEach(([, , top], row) => {
      while (track + 1 < tracks.length && top >= tracks[track + 1].top) track++
      tracks[track].rows.push(row)
    })
  }
  const middle = (row) => (data.rows[row][2] + data.rows[row][3]) / 2
  let grown = 1  // how much taller rows are than they came with the page
  const slot = (row) => grown * (data.rows[row][3] - data.rows[row][2]) / 0.86
  const pad0 = tracks.length ? data.rows[tracks[0].rows[0]][2] - slot(tracks[0].rows[0]) * 0.07 - tracks[0].top : PAD

  // "0-3, 8" are ranks; other words are looked for in the tracks' names.
  const wanted = (name, text) => {
    const words = text.split(",").map((w) => w.trim().toLowerCase()).filter((w) => w)
    if (words.length === 0) return true
    const mine = [...name.matchAll(/(\d+)(?:\s*[–-]\s*(\d+))?/g)].map(([, a, b]) => [Number(a), Number(b ?? a)])
    return words.some((word) => {
      const numbers = /^(\d+)(?:\s*[–-]\s*(\d+))?$/.exec(word)
      if (!numbers) return name.toLowerCase().includes(word)
      const from = Number(numbers[1]), to = Number(numbers[2] ?? numbers[1])
      return mine.some(([a, b]) => a <= to && b >= from)
    })
  }

  const lay = () => {
    const text = $("#ranks-shown").value, empty = $("#empty-rows").checked
    const bands = {left: [], right: [], top: [], bottom: []}, rows = {y: [], height: []}
    const streams = new Map(), names = new Map()
    stepsim.hiddenRows = new Set(data.rows.keys())
    let y = 0, shown = 0
    const kept_of = new Map(tracks.filter((track) => wanted(track.name, text)).map((track) => {
      const few = collapsed.has(track.name)
      return [track, track.rows.filter((row, i) => i === 0 || !few && (empty || busy[row] > NEXT_TO_NOTHING * data.end_s))]
    }))
    grown = 1
    let natural = 0, thinnest = Infinity
    for (const kept of kept_of.values()) natural += 2 * pad0 + kept.reduce((sum, row) => sum + slot(row), 0)
    grown = Math.max(1, Math.min(PAD / pad0, ROOM / Math.max(natural, 1)))
    const pad = grown * pad0
    for (const [track, kept] of kept_of) {
      const few = collapsed.has(track.name), top = y
      y += pad
      for (const row of kept) {
        stepsim.hiddenRows.delete(row)
        const centre = y + slot(row) / 2
        stepsim.shift[row] = centre - middle(row)
        rows.y.push(centre); rows.height.push(slot(row) * 0.86)
        thinnest = Math.min(thinnest, slot(row) * 0.86)
        if (slot(row) > 5.8) streams.set(centre, data.rows[row][1])
        y += slot(row)
      }
      y += pad
      names.set((top + y) / 2, (track.rows.length > 1 ? few ? "▸ " : "▾ " : "") + track.name)
      track.now = [top, y]
      if (shown++ % 2) for (const [key, value] of Object.entries({left: -data.end_s, right: 2 * data.end_s, top, bottom: y})) {
        bands[key].push(value)
      }
    }
    for (const row of stepsim.hiddenRows) stepsim.shift[row] = NaN
    for (const track of tracks) if (!kept_of.has(track)) track.now = null
    stepsim.grown = grown
    const moved = (old, row) => middle(row) + stepsim.shift[row] + grown * (old - middle(row))
    for (let i = 0; i < y0.length; i++) {
      spans.y[i] = moved(y0[i], spans.row[i])
      spans.height[i] = grown * height0[i]
    }
    if (far) {
      far.data.y = Array.from(far0.y, moved)
      far.data.dh = Array.from(far0.dh, (old) => grown * old)
    }
    if (critical) critical.data = {
      ...critical.data,
      y: Array.from(critical0.y, (old, i) => moved(old, critical.data.row[i])),
      height: Array.from(critical0.height, (old) => grown * old),
    }
    model("bands").data_source.data = bands
    model("rows").data_source.data = rows
    const named = thin(names, y)
    const [inner, outer] = plot.left
    inner.major_label_text_font_size = `${Math.max(7, Math.min(11, Math.floor(thinnest)))}px`
    for (const [axis, labels] of [[inner, streams], [outer, named]]) {
      axis.ticker.ticks = [...labels.keys()]
      axis.major_label_overrides = labels
    }
    plot.y_range.setv({start: Math.max(y, 1), end: 0})
    plot.height = Math.round(y) + 60
    $("#rows-note").textContent = shown === tracks.length ? "" : `${shown} of ${tracks.length} shown`
    view.refine(); view.marked?.(); view.told?.()
  }
  const thin = (names, height) => {
    const every = 1 + Math.floor(14 * names.size / Math.max(height, 1))
    return new Map([...names].filter((_, i) => i % every === 0))
  }

  const toggle = (name) => { collapsed.delete(name) || collapsed.add(name); lay() }
  view.collapse = (names) => { collapsed.clear(); names.forEach((name) => collapsed.add(name)); lay() }
  view.collapsed = () => [...collapsed]
  view.trackAt = (y) => tracks.find((t) => t.now && y >= t.now[0] && y <= t.now[1])
  view.trackOf = (row) => tracks.find((t) => t.rows.includes(row))
  view.tracksShown = () => tracks.filter((t) => t.now)
  view.unhide = (row) => {
    if (!stepsim.hiddenRows.has(row)) return
    const track = view.trackOf(row)
    collapsed.delete(track.name)
    if (!wanted(track.name, $("#ranks-shown").value)) $("#ranks-shown").value = ""
    if (busy[row] <= NEXT_TO_NOTHING * data.end_s) $("#empty-rows").checked = true
    lay()
  }
  view.lay = lay
  view.clickedLabel = (y) => { const track = view.trackAt(y); if (track && track.rows.length > 1) toggle(track.name) }
  view.actions.collapse = () => view.collapse(collapsed.size ? [] : tracks.filter((t) => t.rows.length > 1).map((t) => t.name))
  view.keys.c = "collapse"
  $("#collapse").addEventListener("click", view.actions.collapse)
  $("#empty-rows").addEventListener("change", lay)
  $("#ranks-shown").addEventListener("input", lay)
  lay()
})
