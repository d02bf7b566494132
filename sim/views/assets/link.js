// The address keeps what is shown: time, pinned span, range, search, rows, hidden kinds. A copied link opens the same.
"use strict"
stepsim.parts.push((view) => {
  const {$, data} = stepsim, {range} = view
  const number = (x) => String(parseFloat(x.toPrecision(9)))
  const state = () => {
    const out = new URLSearchParams()
    if (range.start > 0 || range.end < data.end_s) out.set("t", `${number(range.start)},${number(range.end)}`)
    if (view.pinnedSpan() >= 0) out.set("pin", view.pinnedSpan())
    if (view.measured()) out.set("range", view.measured().map(number).join(","))
    if ($("#search").value) out.set("search", $("#search").value)
    if ($("#ranks-shown").value) out.set("ranks", $("#ranks-shown").value)
    if ($("#empty-rows").checked) out.set("empty", "1")
    if (view.collapsed().length) out.set("collapsed", view.collapsed().join(";"))
    if (stepsim.hidden.size) out.set("hide", [...stepsim.hidden].join(","))
    if ($("#critical")?.checked) out.set("critical", "1")
    return out.toString()
  }
  let waiting = 0, restoring = false
  const restore = () => {
    const given = new URLSearchParams(location.hash.slice(1))
    const pair = (key) => (given.get(key) ?? "").split(",").map(Number)
    restoring = true
    $("#ranks-shown").value = given.get("ranks") ?? ""
    $("#empty-rows").checked = given.has("empty")
    view.collapse((given.get("collapsed") ?? "").split(";").filter((name) => name))
    view.hide((given.get("hide") ?? "").split(","))
    if ($("#critical") && $("#critical").checked !== given.has("critical")) $("#critical").click()
    const [start, end] = pair("t")
    end > start ? view.go(start, end) : view.go(0, data.end_s)
    const [a, b] = pair("range")
    view.measure(b > a ? [a, b] : null)
    $("#search").value = given.get("search") ?? ""
    view.search()
    const pinned = Number(given.get("pin") ?? -1)
    view.pin(Number.isInteger(pinned) && pinned < stepsim.args.spans.data.start.length ? pinned : -1)
    restoring = false
  }
  let known = location.hash // what was last opened or written; where it differs, a link was opened that is still to be read
  const write = (hash) => {
    history.replaceState(null, "", hash ? `#${hash}` : location.pathname + location.search)
    known = location.hash
  }
  if (location.hash.length > 1) restore()
  view.told = () => {
    if (restoring) return
    clearTimeout(waiting)
    waiting = setTimeout(() => {
      const hash = state()
      if (location.hash === known && hash !== known.slice(1)) write(hash)
    }, 150)
  }
  window.addEventListener("hashchange", () => {
    known = location.hash
    restore()
  })
  $("#copy-link")?.addEventListener("click", (event) => {
    clearTimeout(waiting)
    write(state())
    stepsim.copy(location.href, event.target)
  })
})
