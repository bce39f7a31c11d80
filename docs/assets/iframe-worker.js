// The search runs in a Worker, which browsers refuse to pages that are opened as files. There it runs in a hidden frame.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.body.append(frame);
      const inner = frame.contentWindow, page = frame.contentDocument;
      inner.postMessage = (data) => {
        const event = new MessageEvent("message", { data });
        this.dispatchEvent(event);
        if (this.onmessage) this.onmessage(event);
      };
      inner.importScripts = (...urls) => urls.reduce((before, one) => before.then(() => load(one)), Promise.resolve());
      const load = (one) => new Promise((resolve, reject) => {
        const script = page.createElement("script");
        script.src = one;
        script.onload = resolve;
        script.onerror = reject;
        page.body.append(script);
      });
      this.inner = inner;
      this.ready = load(String(url));
    }
    postMessage(data) {
      this.ready.then(() => this.inner.dispatchEvent(new this.inner.MessageEvent("message", { data })));
    }
    terminate() {}
  };
}
