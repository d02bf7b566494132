// Light and dark: pages follow the system until a button says otherwise. Plots know nothing of style sheets, so their
// inks are changed here.
"use strict";
(() => {
  window.stepsim ??= {}
  const system = matchMedia("(prefers-color-scheme: dark)")
  const DARK = {"#1b2733": "#e6ebf0", "#5b6875": "#a3afbb", "#e3e8ee": "#2c3742", "#444444": "#a3afbb", "#e5e5e5": "#2c3742",
                "#b8c1cb": "#55626f", "black": "#a3afbb", "#000000": "#e6ebf0", "#dfe5eb": "#2a343e", "#f4f6f8": "#1d262f"}
  const LIGHT = Object.fromEntries(Object.entries(DARK).map(([light, dark]) => [dark, light]))
  const first = new Map()  // of each property its light value
  const inks = ["text_color", "line_color", "fill_color", "grid_line_color", "axis_line_color", "axis_label_text_color",
    "major_label_text_color", "major_tick_line_color", "minor_tick_line_color", "label_text_color", "background_fill_color",
    "border_line_color", "border_fill_color", "outline_line_color", "title_text_color"]

  const paint = () => {
    const dark = document.documentElement.dataset.theme === "dark"
    for (const shown of window.Bokeh?.documents ?? []) {
      for (const model of shown._all_models.values()) {
        for (const name of inks) {
          if (!(name in model.properties)) continue
          const key = model.id + name
          if (!first.has(key)) first.set(key, model[name])
          const was = first.get(key), colour = was?.value ?? was
          if (model.type === "Legend" && name === "background_fill_color") model[name] = dark ? "#161d24" : was
          else if (typeof colour === "string" && colour in DARK) {
            const now = dark ? DARK[colour] : colour
            model[name] = was?.value === undefined ? now : {...was, value: now}
          }
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
  const wait = () => window.Bokeh?.documents.length ? paint() : setTimeout(wait, 25)
  if (document.querySelector(".plot")) wait()
})()
