// Level of detail, on every page with a timeline. `stepsim.refine` runs when the view moves: few spans in view are drawn
// one by one, of many a picture is made, whose pixels take the kind that fills most of them. What lies outside the view
// is not drawn at all: Bokeh would leave a line of its edge at the plot's.
"use strict";
window.stepsim ??= {};
(() => {
  const {max, min, floor, ceil, round} = Math

  // All spans in columns, sorted by row and start: as they came with the page, or gathered from the bars of each kind.
  const gather = (args) => {
    const parts = args.near.map((r) => r ? {...r.data_source.data} : {start: []})
    const names = [...new Set(parts.flatMap((part) => Object.keys(part)))]
    const places = parts.flatMap((part, kind) => Array.from(part.start, (_, i) => [kind, i]))
    const of = (name, [kind, i]) => parts[kind][name]?.[i]
    places.sort((a, b) => of("row", a) - of("row", b) || of("start", a) - of("start", b))
    const data = Object.fromEntries(names.map((name) => [name, places.map((place) => of(name, place))]))
    return {data: {...data, kind: places.map(([kind]) => kind)}}
  }

  // Of spans sorted by row and start: where each row begins, and the latest end up to each span.
  const index = (args) => {
    if (args.spans.stepsim) return args.spans.stepsim
    const {row, end} = args.spans.data
    const first = new Int32Array(args.rows + 1).fill(row.length)
    const reach = new Float64Array(row.length)
    for (let i = row.length - 1; i >= 0; i--) first[row[i]] = i
    for (let r = args.rows - 1; r >= 0; r--) first[r] = min(first[r], first[r + 1])
    for (let i = 0; i < row.length; i++) {
      reach[i] = i > 0 && row[i] === row[i - 1] ? max(end[i], reach[i - 1]) : end[i]
    }
    return args.spans.stepsim = {first, reach}
  }
  const bisect = (from, to, before) => {
    while (from < to) {
      const middle = (from + to) >> 1
      before(middle) ? from = middle + 1 : to = middle
    }
    return from
  }
  // The spans of a row that may be seen between two times.
  const seen = (args, row, from_s, to_s) => {
    const {first, reach} = index(args), {start} = args.spans.data
    return [bisect(first[row], first[row + 1], (i) => reach[i] <= from_s),
            bisect(first[row], first[row + 1], (i) => start[i] < to_s)]
  }

  const exact = (args, ranges) => {
    const all = args.spans.data, names = Object.keys(all).filter((n) => n !== "kind")
    const chosen = args.kinds.map(() => [])
    for (const [from, to] of ranges) for (let i = from; i < to; i++) chosen[all.kind[i]].push(i)
    chosen.forEach((list, kind) => {
      if (!args.near[kind]) return
      const columns = {}
      for (const name of names) {
        if (all[name][list[0]] !== undefined || list.length === 0) columns[name] = Array.from(list, (i) => all[name][i])
      }
      args.near[kind].data_source.setv({data: columns}, {sync: false})  // the explorer's server need not know
    })
  }

  const picture = (args, ranges, from_s, to_s) => {
    const {start, end, kind, lane} = args.spans.data, source = args.far.data_source
    const width = args.pixels, per_s = width / (to_s - from_s), kinds = args.kinds.length
    ranges.forEach(([from, to], row) => {
      const image = source.data.image[row], lanes = image.length / width
      const filled = new Float32Array(image.length * kinds)
      for (let i = from; i < to; i++) {
        if (stepsim.hidden?.has(args.kinds[kind[i]])) continue
        const a = max(0, (start[i] - from_s) * per_s), b = min(width, (end[i] - from_s) * per_s)
        const base = lane[i] * width
        for (let p = floor(a), last = min(width - 1, ceil(b) - 1); p <= last; p++) {
          filled[(base + p) * kinds + kind[i]] += max(min(b, p + 1) - max(a, p), 1e-6)
        }
      }
      for (let p = 0; p < image.length; p++) {
        let most = 0, which = -1, sum = 0
        for (let k = 0; k < kinds; k++) {
          const share = filled[p * kinds + k]
          sum += share
          if (share > most) { most = share; which = k }
        }
        image[(lanes - 1 - floor(p / width)) * width + p % width] =
          which < 0 ? 0 : (args.colours[which] | (round(70 + 185 * min(1, sum)) << 24)) >>> 0
      }
    })
    source.data.x.fill(from_s)
    source.data.dw.fill(to_s - from_s)
    source.change.emit()
  }

  const draw = (args) => {
    const {start, end} = args.plot.x_range
    const ranges = Array.from({length: args.rows}, (_, row) => {
      return stepsim.hiddenRows?.has(row) ? [0, 0] : seen(args, row, start, end)
    })
    const few = ranges.reduce((n, [from, to]) => n + to - from, 0) <= args.most
    if (few) exact(args, ranges)
    else picture(args, ranges, start, end)
    if (args.far) args.far.visible = !few
    args.near.forEach((r, kind) => { if (r) r.visible = few && !stepsim.hidden?.has(args.kinds[kind]) })
    stepsim.drawn?.(few)
  }

  stepsim.refine = (given) => {
    const args = stepsim.args = given.plot.stepsim_args ??= {...given, spans: given.spans ?? gather(given)}
    if (args.plot.stepsim_waiting) return
    args.plot.stepsim_waiting = true
    requestAnimationFrame(() => { args.plot.stepsim_waiting = false; draw(args) })
  }

  // Which spans lie under a point of the picture: indices, the longest there first.
  stepsim.under = (args, row, time_s, half = (args.plot.x_range.end - args.plot.x_range.start) / args.pixels) => {
    const [from, to] = seen(args, row, time_s - half, time_s + half)
    const {start, end} = args.spans.data
    const found = []
    for (let i = from; i < to; i++) if (end[i] > time_s - half) found.push(i)
    return found.sort((a, b) => (end[b] - start[b]) - (end[a] - start[a]))
  }
})()
