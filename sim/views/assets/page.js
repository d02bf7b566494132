// What the page does once Bokeh has drawn it: legend, zoom, labels, memory by rank, and the text of tooltips.
// `stepsim.data` is set by the page before this runs: {details, rows, bands, kinds, memory, end_s}. Scripts that follow
// add themselves to `stepsim.parts`: functions of the object `view` that `start` makes.
"use strict";
(() => {
  const data = stepsim.data
  const $ = stepsim.$ = (query) => document.querySelector(query)
  const all = stepsim.all = (query) => [...document.querySelectorAll(query)]
  const hidden = stepsim.hidden = new Set()
  stepsim.parts = []

  stepsim.seconds = (s) => {
    const a = Math.abs(s)
    if (a === 0) return "0 s"
    const [scale, unit] = a < 1e-3 ? [1e6, "µs"] : a < 1 ? [1e3, "ms"] : [1, "s"]
    const x = s * scale
    return x.toFixed(Math.max(0, 4 - String(Math.trunc(Math.abs(x))).length)) + " " + unit
  }
  stepsim.bytes = (b) => {
    const units = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"]
    let i = 0
    while (Math.abs(b) >= 1024 && i < units.length - 1) { b /= 1024; i++ }
    return (i === 0 ? b.toFixed(0) : String(parseFloat(b.toPrecision(4)))) + " " + units[i]
  }
  stepsim.percent = (share) => `${(100 * share).toFixed(1)} %`

  // --- tooltips: plain text, which Bokeh escapes ---------------------------------------------------------------
  stepsim.hover = (part, vars) => {
    return describe(part, model(vars.name).data_source.data, vars.index, vars.name.split(":")[1])
  }
  stepsim.farHover = (part, vars, args) => {
    const row = stepsim.rowAt(vars.y)
    const found = row < 0 ? [] : stepsim.under(args, row, vars.x)
    if (found.length === 0) return part === "title" ? "nothing runs" : row < 0 ? "" : data.rows[row].slice(0, 2).join(", ")
    const spans = args.spans.data
    const more = found.length > 1 ? `\nand ${found.length - 1} more here: zoom in` : ""
    return describe(part, spans, found[0], Object.keys(data.kinds)[spans.kind[found[0]]]) + (part === "title" ? "" : more)
  }
  // The row at a height of the plot; rows.js moves them.
  stepsim.shift = data.rows.map(() => 0)
  stepsim.grown = 1
  stepsim.rowAt = (y) => data.rows.findIndex(([, , top, bottom], row) => {
    return Math.abs(y - (top + bottom) / 2 - stepsim.shift[row]) <= stepsim.grown * (bottom - top) / 2
  })
  const describe = stepsim.describe = (part, columns, i, kind) => {
    const row = data.rows[columns.row[i]]
    const time = `${stepsim.seconds(columns.end[i] - columns.start[i])}, from ${stepsim.seconds(columns.start[i])}`
    const label = data.kinds[kind].label
    const [name, bytes, bandwidth, source, note] = data.details[columns.detail[i]]
    if (part === "title") return name && name !== label ? `${label}: ${name}` : label
    const lines = [`${row[0]}, ${row[1]}`]
    const place = []
    if (columns.stage[i] >= 0) place.push(`stage ${columns.stage[i]}`)
    if (columns.micro[i] >= 0) place.push(`${data.item} ${columns.micro[i]}`)
    if (place.length) lines.push(place.join(", "))
    lines.push(time)
    if (bytes) lines.push(stepsim.bytes(bytes) + (bandwidth ? `, bus bandwidth ${(bandwidth / 1e9).toPrecision(4)} GB/s` : ""))
    if (source) lines.push(`cost: ${source}`)
    if (note) lines.push(note)
    return lines.join("\n")
  }
  stepsim.memoryHover = (part, vars) => {
    const columns = model("memory:probe").data_source.data
    const i = vars.index
    if (part === "title") return `at ${stepsim.seconds(columns.time[i])}: ${stepsim.bytes(columns.buffers[i])}`
    let below = 0
    return data.categories.map(([key, label]) => {
      const size = columns[key][i] - below
      below = columns[key][i]
      return `${label}: ${stepsim.bytes(size)}`
    }).reverse().join("\n")
  }

  const cache = new Map()
  const model = (name) => {
    if (!cache.has(name)) cache.set(name, Bokeh.documents[0].get_model_by_name(name))
    return cache.get(name)
  }

  function start() {
    const plot = model("timeline")
    const range = plot.x_range
    const exact = Object.keys(data.kinds).filter((k) => model(`exact:${k}`))
    const many = model("far") !== null
    let near = !many
    const refine = () => range.properties.start.change.emit()
    const view = {plot, range, model, refine, many}
    stepsim.drawn = (few) => { near = few; label(); told() }

    // --- legend ------------------------------------------------------------------------------------------------
    const press = (button, on) => {
      button.setAttribute("aria-pressed", String(on))
      on ? hidden.delete(button.dataset.kind) : hidden.add(button.dataset.kind)
    }
    for (const button of all(".legend button")) {
      button.addEventListener("click", () => {
        press(button, button.getAttribute("aria-pressed") !== "true")
        refine(); view.told?.()
      })
    }
    view.hide = (kinds) => {
      for (const button of all(".legend button")) press(button, !kinds.includes(button.dataset.kind))
      refine()
    }

    // --- labels in bars: in a row those of a kind have all one, or none ----------------------------------------
    const label = () => {
      const out = {x: [], y: [], text: [], color: []}
      const per_px = (range.end - range.start) / (plot.inner_width || 1000)
      for (const kind of near ? exact : []) {
        if (hidden.has(kind)) continue
        const c = model(`exact:${kind}`).data_source.data
        const {label: long, text: color} = data.kinds[kind]
        const whole = (i) => c.start[i] >= range.start && c.end[i] <= range.end
        const crowded = new Set()  // rows where the number of a micro-batch finds no room in its bar
        for (let i = 0; i < c.start.length; i++) {
          const needed = Math.max(9, String(c.micro[i]).length * 6 + 3)
          if (c.micro[i] >= 0 && whole(i) && (c.end[i] - c.start[i]) / per_px < needed) crowded.add(c.row[i])
        }
        for (let i = 0; i < c.start.length && out.x.length < 1200; i++) {
          if (c.end[i] <= range.start || c.start[i] >= range.end || c.height[i] < 11) continue
          const from = Math.max(c.start[i], range.start), to = Math.min(c.end[i], range.end)
          const px = (to - from) / per_px
          if (px < 9) continue
          const mb = c.micro[i] >= 0 ? String(c.micro[i]) : ""
          const lasts = stepsim.seconds(c.end[i] - c.start[i]), name = data.details[c.detail[i]][0]
          const choices = mb === "" || data.single ? [...(name ? [`${name} · ${lasts}`, name] : []), long]
            : [`${long} · ${data.item} ${mb} · ${lasts}`, `${long} ${mb}`, ...(crowded.has(c.row[i]) ? [] : [mb])]
          const text = choices.find((t) => t.length * (t === mb ? 6 : 6.6) + 3 < px)
          if (!text) continue
          out.x.push((from + to) / 2); out.y.push(c.y[i]); out.text.push(text); out.color.push(color)
        }
      }
      model("labels").data_source.data = out
    }

    // --- where the view is ---------------------------------------------------------------------------------------
    const told = () => {
      const whole = range.start <= 0 && range.end >= data.end_s
      $("#view").textContent = (whole ? "the full step" : `${stepsim.seconds(range.start)} – ${stepsim.seconds(range.end)}`)
        + (many && near ? ", every span" : "")
      view.told?.()
    }

    // --- where the mouse is: Bokeh's frame in pixels of the window, and times and heights in it ------------------
    const find = (v) => v.model === plot ? v : [...(v.child_views ?? [])].map(find).find((x) => x)
    view.frame = () => {
      const found = [...Bokeh.index].map(find).find((v) => v), box = found.el.getBoundingClientRect()
      const inner = found.frame.bbox
      return {left: box.x + inner.x0, top: box.y + inner.y0, width: inner.width, height: inner.height}
    }
    view.at = (event) => {
      const f = view.frame(), y_range = plot.y_range
      return {
        time_s: range.start + (event.clientX - f.left) / f.width * (range.end - range.start),
        y: y_range.end + (event.clientY - f.top) / f.height * (y_range.start - y_range.end),
        inside: event.clientX >= f.left && event.clientX <= f.left + f.width,
        per_px: (range.end - range.start) / f.width,
      }
    }

    // --- zoom by button and by key -----------------------------------------------------------------------------
    const go = view.go = (start, end) => {
      const width = Math.min(Math.max(end - start, data.end_s * 1e-6), data.end_s)
      start = Math.min(Math.max(start, 0), data.end_s - width)
      range.setv({start, end: start + width})
    }
    let pointer = null
    $("#plots").addEventListener("pointermove", (event) => { pointer = event })
    $("#plots").addEventListener("pointerleave", () => { pointer = null })
    const around = (factor) => {
      const w = range.end - range.start, mouse = pointer && view.at(pointer)
      const share = mouse?.inside ? (mouse.time_s - range.start) / w : 0.5
      go(range.start + w * share * (1 - factor), range.start + w * share * (1 - factor) + w * factor)
    }
    const actions = view.actions = {
      in: () => around(0.5),
      out: () => around(2),
      left: () => { const w = range.end - range.start; go(range.start - w / 4, range.end - w / 4) },
      right: () => { const w = range.end - range.start; go(range.start + w / 4, range.end + w / 4) },
      whole: () => go(0, data.end_s),
    }
    for (const button of all("button[data-zoom]")) button.addEventListener("click", () => {
      pointer = null
      actions[button.dataset.zoom]()
    })
    const keys = view.keys = {"+": "in", "=": "in", "-": "out", "ArrowLeft": "left", "ArrowRight": "right", "0": "whole",
                              "w": "in", "s": "out", "a": "left", "d": "right"}
    document.addEventListener("keydown", (event) => {
      const action = actions[keys[event.key]]
      if (!action || event.ctrlKey || event.metaKey || event.altKey) return
      if (event.target.closest("select, textarea, input:not([type=checkbox])") && event.key !== "Escape") return
      event.preventDefault()
      action()
    })
    $("#plots").addEventListener("dblclick", actions.whole)

    // --- critical path -----------------------------------------------------------------------------------------
    const toggle = $("#critical")
    if (toggle && model("critical")) {
      const set = () => { model("critical").visible = toggle.checked; view.told?.() }
      toggle.addEventListener("change", set)
      set()
    }
    if (window.innerWidth < 700) narrow()

    memory()
    refine()
    for (const part of stepsim.parts) part(view)
    told(); label()
    requestAnimationFrame(() => { document.documentElement.dataset.ready = "true" })
  }

  // Streams' names leave no room for the plot on a telephone, and ranks' names little. All plots begin where the ranks'
  // names end, else the time axis would not fit the bars.
  function narrow() {
    const [streams, ranks] = model("timeline").left
    streams.visible = false
    ranks.major_label_text_font_size = "10px"
    const longest = Math.max(...[...ranks.major_label_overrides.values()].map((name) => name.length))
    const left = Math.max(76, 30 + 6.5 * longest)
    for (const plot of ["axis", "timeline", "memory"].map(model).filter((plot) => plot)) {
      plot.min_border_left = Math.round(left)
      for (const axis of [...plot.above, ...plot.below]) axis.ticker.desired_num_ticks = 4
    }
  }

  // --- memory of the chosen rank ---------------------------------------------------------------------------------
  function memory() {
    const chart = model("memory")
    const select = $("#rank")
    if (!chart || !select || data.memory.length === 0) return
    const draw = () => {
      const curve = data.memory[Number(select.value)]
      const columns = {time: curve.time, base: curve.time.map(() => 0)}
      let below = columns.base
      for (const [key] of data.categories) {
        below = curve[key].map((size, i) => size + below[i])
        columns[key] = below
      }
      const peak = below.reduce((a, b) => Math.max(a, b), 0)
      const limit = data.limit_bytes
      const shown = limit > 0 && limit < 3 * peak
      chart.y_range.setv({start: 0, end: (shown ? Math.max(peak, limit) : peak) * 1.08 || 1})
      model("memory:total").data_source.data = columns
      $("#memory-note").textContent = `Peak ${stepsim.bytes(peak)}`
        + (limit > 0 ? ` of ${stepsim.bytes(limit)} that may be reserved (${(100 * peak / limit).toFixed(1)} %)` : "")
        + (limit > 0 && !shown ? "; the device's limit lies above the plot." : limit > 0 ? "; the dashed line is the device's limit." : ".")
    }
    select.addEventListener("change", draw)
    draw()
  }

  function wait() {
    const ready = window.Bokeh && Bokeh.documents.length > 0 && all(".plot").every((e) => e.childElementCount > 0)
    ready ? start() : setTimeout(wait, 25)
  }
  document.readyState === "loading" ? document.addEventListener("DOMContentLoaded", wait) : wait()
})()
