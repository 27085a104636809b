// The theme searches in a worker, which a page that is opened from a folder may not start: there a frame does its work.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super()
      const frame = document.createElement("iframe")
      frame.hidden = true
      document.body.append(frame)
      this.inside = frame.contentWindow
      this.inside.postMessage = data => {
        const event = new MessageEvent("message", { data })
        this.dispatchEvent(event)
        this.onmessage?.(event)
      }
      this.inside.importScripts = async (...urls) => { for (const each of urls) await this.run(each) }
      this.ready = this.run(url)
    }
    run(url) {
      return new Promise((resolve, reject) => {
        const script = this.inside.document.createElement("script")
        Object.assign(script, { src: url, onload: resolve, onerror: reject })
        this.inside.document.body.append(script)
      })
    }
    postMessage(data) {
      this.ready.then(() => this.inside.dispatchEvent(new this.inside.MessageEvent("message", { data })))
    }
    terminate() {
      this.inside.frameElement.remove()
    }
  }
}
