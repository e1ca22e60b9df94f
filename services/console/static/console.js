// What pages can do beyond HTML: times in the zone of the viewer, pages that stay current, keys, and copying.
"use strict";

const LIVE_INTERVAL = 2000;

function showTimes(root) {
  const zoned = new Intl.DateTimeFormat("sv", {
    year: "numeric", month: "2-digit", day: "2-digit", hour: "2-digit", minute: "2-digit", second: "2-digit",
    timeZoneName: "short",
  });
  for (const time of root.querySelectorAll("time[datetime]")) {
    const local = zoned.format(new Date(time.dateTime));
    const utc = time.dateTime.slice(0, 19).replace("T", " ") + " UTC";
    time.title = `${local}\n${utc}`;
    if (time.classList.contains("exact")) time.textContent = local.endsWith("UTC") ? local : `${local} (${utc})`;
  }
}

function showCopyButtons(root) {
  for (const button of root.querySelectorAll("[data-copy]")) button.hidden = !navigator.clipboard;
}

function enhance(root) {
  showTimes(root);
  showCopyButtons(root);
}

// Reads the page again, and changes in place what differs. Nothing moves under the pointer, the selection or an open dialog.
let isReading = false;

function isInUse() {
  return document.querySelector("dialog[open], form.act, .actions a:hover, .list a:hover, .concerns a:hover") || !getSelection().isCollapsed;
}

// What is shown stays, and the link leads back to it.
let isSignedOut = false;

function showSignedOut() {
  isSignedOut = true;
  const message = document.getElementById("signed-out");
  message.querySelector("a").href = "/sign-in?return=" + encodeURIComponent(location.pathname + location.search);
  message.hidden = false;
}

async function refresh() {
  if (isReading || isSignedOut) return;
  isReading = true;
  const stale = document.getElementById("stale");
  try {
    const response = await fetch(location.href, { signal: AbortSignal.timeout(30000) });
    const html = new DOMParser().parseFromString(await response.text(), "text/html");
    const fresh = html.getElementById("page");
    if (!fresh && response.status === 401) {
      showSignedOut();
      return;
    }
    if (!fresh) throw new Error(`no page in an answer with status ${response.status}`);
    enhance(fresh);
    if (!isInUse()) {
      Idiomorph.morph(document.getElementById("page"), fresh.childNodes, {
        morphStyle: "innerHTML",
        callbacks: {
          beforeNodeMorphed: (node) => !(node === document.activeElement && node.matches("input")),
          beforeAttributeUpdated: (name, node) => !(name === "open" && node.localName === "details"),
        },
      });
    }
    stale.hidden = true;
  } catch {
    stale.hidden = false;
  } finally {
    document.body.classList.toggle("stale", !stale.hidden);
    isReading = false;
  }
}

async function stayCurrent() {
  for (;;) {
    await new Promise((done) => setTimeout(done, LIVE_INTERVAL));
    const isLive = document.querySelector("#page [data-live]");
    if (isLive && document.visibilityState === "visible" && !isInUse()) await refresh();
  }
}

let goes = false;
document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  const field = event.target.closest("input, textarea, select");
  if (field) {
    if (event.key === "Escape") field.blur();
    return;
  }
  const link = goes && document.querySelector(`.side a[data-key="${CSS.escape(event.key)}"]`);
  goes = false;
  if (link) {
    link.click();
  } else if (event.key === "g") {
    goes = true;
  } else if (event.key === "/") {
    const filter = document.getElementById("filter");
    if (!filter) return;
    event.preventDefault();
    filter.focus();
    filter.select();
  } else if (event.key === "?") {
    document.getElementById("keys").showModal();
  } else if (event.key === "r" && !event.repeat && !document.querySelector("dialog[open]")) {
    refresh();
  }
});

document.addEventListener("click", async (event) => {
  const button = event.target.closest("[data-copy]");
  if (!button) return;
  await navigator.clipboard.writeText(button.dataset.copy);
  button.textContent = "Copied";
  setTimeout(() => { button.textContent = "Copy"; }, 1500);
});

enhance(document);
// On a phone, the navigation is one line that scrolls.
document.querySelector(".side [aria-current]")?.scrollIntoView({ block: "nearest", inline: "center" });
stayCurrent();
