// States from the router, one a second; whatever breaks, it tries again, or has the user log in.

const SILENCE_MS = 5000;
const RETRY_MS = 1000;

export function follow(url, onState, onStatus) {
  let source = null;
  let watchdog = 0;

  function expect() {
    clearTimeout(watchdog);
    watchdog = setTimeout(reopen, SILENCE_MS);
  }

  function reopen() {
    source?.close();
    onStatus("lost");
    setTimeout(open, RETRY_MS);
  }

  // Why a stream was refused is not said to scripts; if for want of a key, the page is a login now.
  async function logInIfAsked() {
    const answer = await fetch("/", { method: "HEAD" }).catch(() => null);
    if (answer?.status === 401) location.reload();
  }

  function open() {
    source = new EventSource(url);
    expect();
    source.onmessage = (message) => {
      expect();
      onStatus("live");
      onState(JSON.parse(message.data));
    };
    source.onerror = () => {
      onStatus("lost");
      // The browser comes again by itself, unless it was refused.
      if (source.readyState === EventSource.CLOSED) {
        clearTimeout(watchdog);
        logInIfAsked();
        reopen();
      }
    };
  }

  open();
}
