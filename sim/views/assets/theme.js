// Light and dark: pages follow the system until a button says otherwise. Plots know nothing of style sheets, so their
// inks are changed here.
"use strict";
(() => {
  window.stepsim ??= {}
  const system = matchMedia("(prefers-color-scheme: dark)")
  const DARK = {"#1b2733": "#e6ebf0", "#5b6875": "#a3afbb", "#e3e8ee": "#2c3742", "#444444": "#a3afbb", "#e5e5e5": "#2c3742",
                "#b8c1cb": "#55626f", "black": "#a3afbb", "#000000": "#e6ebf0", "#dfe5eb": "#2a343e", "#f4f6f8": "#1d262f",
                "#b3261e": "#ff8a80"}
  const first = new Map()  // of each property its light value
  const inks = ["text_color", "line_color", "fill_color", "grid_line_color", "axis_line_color", "axis_label_text_color",
    "major_label_text_color", "major_tick_line_color", "minor_tick_line_color", "label_text_color", "background_fill_color",
    "border_line_color", "border_fill_color", "outline_line_color", "title_text_color"]

  // Changes stay in the browser: the explorer's server knows of one theme only.
  const put = (model, name, value) => {
    if (value !== undefined && model[name] !== value) model.setv({[name]: value}, {sync: false})
  }
  const paint = () => {
    const dark = document.documentElement.dataset.theme === "dark", paper = dark ? "#12181e" : "#ffffff"
    for (const shown of window.Bokeh?.documents ?? []) {
      for (const model of shown._all_models.values()) {
        for (const name of inks) {
          if (!(name in model.properties)) continue
          if (name === "border_fill_color" || name === "background_fill_color") {
            if (model.type === "Legend") put(model, name, dark ? "#161d24" : "#ffffff")
            else if ("x_range" in model.properties) put(model, name, paper)  // a plot; texts have backgrounds too
            continue
          }
          const key = model.id + name
          if (!first.has(key)) first.set(key, model[name])
          const was = first.get(key), colour = was?.value ?? was
          if (typeof colour !== "string" || !(colour in DARK)) continue
          const now = dark ? DARK[colour] : colour
          if (was?.value === undefined) put(model, name, now)
          else if (model[name]?.value !== now) put(model, name, {...was, value: now})
        }
      }
    }
  }
  const set = () => {
    const chosen = (() => { try { return localStorage.getItem("stepsim-theme") } catch { return null } })()
    document.documentElement.dataset.theme = chosen ?? (system.matches ? "dark" : "light")
    paint()
  }
  set()
  system.addEventListener("change", set)
  const button = document.querySelector("#theme")
  button?.addEventListener("click", () => {
    const next = document.documentElement.dataset.theme === "dark" ? "light" : "dark"
    try { localStorage.setItem("stepsim-theme", next) } catch { document.documentElement.dataset.theme = next; paint() }
    set()
  })
  let waiting = 0
  const wait = () => {
    if (!window.Bokeh?.documents.length) { setTimeout(wait, 25); return }
    document.querySelector("#loading")?.remove()
    paint()
    if (stepsim.live) Bokeh.documents[0].on_change(() => { clearTimeout(waiting); waiting = setTimeout(paint, 60) })
  }
  if (stepsim.live || document.querySelector(".plot")) wait()
})()
