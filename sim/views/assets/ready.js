// marks the document when all is drawn
const waiting = setInterval(() => {
  if (!window.Bokeh || (Bokeh.documents.length && Bokeh.documents[0].is_idle)) {
    clearInterval(waiting)
    document.documentElement.dataset.ready = "true"
  }
}, 30)
