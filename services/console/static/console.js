// What pages can do beyond HTML: times in the zone of the viewer, pages that stay current, keys, copying, saved filters, and the palette.
"use strict";

const LIVE_INTERVAL = 2000;
// Between questions whether the services answer at all: with the patience of the console, a viewer knows within two seconds.
const HEARTBEAT = 1000;
// Between questions how much is new to an open list.
const NEWS_INTERVAL = 5000;

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

// Filters that this browser keeps: addresses of lists.
function saved() {
  try {
    return JSON.parse(localStorage.getItem("saved")).filter((address) => /^\/[a-z]+\?/.test(address));
  } catch {
    return [];
  }
}

function element(name, text, attributes) {
  const made = Object.assign(document.createElement(name), attributes);
  made.append(text);
  return made;
}

function savedLink(address) {
  // Isolated, because a filter can contain marks that change the direction.
  const filter = new URLSearchParams(address.split("?")[1]).get("filter");
  return element("a", element("bdi", filter || address), { href: address });
}

function showSaved() {
  const place = document.querySelector("[data-saved]");
  if (!place) return;
  const search = new URLSearchParams(location.search);
  search.delete("page");
  const here = `${location.pathname}?${search}`;
  const kept = saved();
  const button = (label, name, list) => element("button", label, { type: "button", ariaLabel: name, onclick: () => {
    localStorage.setItem("saved", JSON.stringify(list.slice(0, 20)));
    showSaved();
    place.querySelector("a, button")?.focus();
  } });
  const links = kept.filter((address) => address.startsWith(location.pathname + "?")).flatMap((address) => {
    const link = savedLink(address);
    return [link, button("×", `Forget ${link.textContent}`, kept.filter((other) => other !== address))];
  });
  if (search.get("filter") && !kept.includes(here)) links.push(button("Save this filter", null, [here, ...kept]));
  place.replaceChildren(...links);
  place.hidden = links.length === 0;
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

// Problems that can pass: outside of a section, one takes the place of the whole page.
const passing = (part) => part.querySelector?.("[data-passes]");
const ofPage = (page) => [...page.querySelectorAll("[data-passes]")].find((problem) => !problem.closest("section"));

// Shows a fresh page. What a service has said before stays while it is silent, and then the problem is returned.
function morph(fresh) {
  const page = document.getElementById("page");
  let problem = ofPage(page) ? null : ofPage(fresh);
  if (problem) return problem;
  const isLost = (node, next) => node.localName === "section" && passing(next) && !passing(node);
  Idiomorph.morph(page, fresh.childNodes, {
    morphStyle: "innerHTML",
    callbacks: {
      beforeNodeMorphed: (node, next) => {
        if (isLost(node, next)) {
          problem = passing(next);
          return false;
        }
        return !(node === document.activeElement && node.matches("input")) && !node.matches?.("[data-saved]");
      },
      beforeAttributeUpdated: (name, node) => !(name === "open" && node.localName === "details"),
    },
  });
  return problem;
}

function showSilence(who) {
  const silent = document.getElementById("silent");
  silent.hidden = !who;
  if (who) silent.textContent = `${who}. What it has answered before is still shown.`;
}

function showStale(why) {
  const stale = document.getElementById("stale");
  stale.hidden = !why;
  if (why) stale.textContent = `Not current: ${why}.`;
}

async function refresh() {
  if (isReading || isSignedOut) return;
  isReading = true;
  const late = setTimeout(() => showStale("waiting for an answer"), LIVE_INTERVAL);
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
    if (!isInUse()) showSilence(morph(fresh)?.querySelector("strong").textContent);
    showStale(null);
  } catch {
    showStale("the console does not answer");
  } finally {
    clearTimeout(late);
    document.body.classList.toggle("stale", !document.getElementById("stale").hidden);
    isReading = false;
  }
}

// A page is read for as long as a service is silent; this is told earlier.
async function listen() {
  if (isSignedOut || passing(document.getElementById("page"))) return;
  try {
    const response = await fetch("/silent", { signal: AbortSignal.timeout(LIVE_INTERVAL) });
    const who = response.ok && await response.text();
    if (who && !isInUse()) showSilence(who);
  } catch {
    // Reading the page tells that the console does not answer.
  }
}

// Says how much is new to an open list. Its rows stay where they are until a person asks for the new ones.
async function follow() {
  const news = document.querySelector("#page [data-news]");
  if (!news || isSignedOut) return;
  const address = news.dataset.news;
  try {
    const response = await fetch(address, { signal: AbortSignal.timeout(LIVE_INTERVAL) });
    if (response.status === 401) showSignedOut();
    const text = response.ok && await response.text();
    // Meanwhile, the list can have been read again.
    if (!text || news.dataset.news !== address) return;
    news.querySelector("span").textContent = text;
    news.hidden = false;
    // So many are not counted again.
    if (text.includes("+")) delete news.dataset.news;
  } catch {
    // The list says when it was read.
  }
}

async function stayCurrent() {
  for (let beat = 1; ; beat++) {
    await new Promise((done) => setTimeout(done, HEARTBEAT));
    if (document.visibilityState !== "visible") continue;
    if (beat * HEARTBEAT % NEWS_INTERVAL === 0) follow();
    const isLive = document.querySelector("#page [data-live], #page [data-passes], #silent:not([hidden])");
    if (!isLive || isInUse()) continue;
    if (beat * HEARTBEAT % LIVE_INTERVAL === 0) refresh();
    await listen();
  }
}

// Completes the last condition of a filter, where a browser completes only the whole text.
document.addEventListener("input", ({ target }) => {
  const list = target.list;
  if (!list) return;
  list.conditions ??= [...list.options].filter((option) => !("longer" in option.dataset)).map((option) => option.value);
  const head = target.value.match(/^.*\b(?:AND|OR|NOT)\s+\(*|^\(+/)?.[0] ?? "";
  if (list.options[0]?.value === head + list.conditions[0]) return;
  list.replaceChildren(...list.conditions.map((condition) => element("option", "", { value: head + condition })));
});

let goes = false;
document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || document.querySelector("dialog[open]")) return;
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
  } else if (event.key === "r" && !event.repeat) {
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

// The palette: what the page Find lists for a text, then the saved filters that contain it.
const palette = document.getElementById("palette");
const paletteText = palette.querySelector("input");
let wanted = 0;
let shown = null;

async function find(delay) {
  const mine = ++wanted;
  await new Promise((done) => setTimeout(done, delay));
  if (mine !== wanted) return;
  const text = paletteText.value.trim();
  const status = palette.querySelector("[role=status]");
  try {
    const response = await fetch(`/find?q=${encodeURIComponent(text)}`, { signal: AbortSignal.timeout(10000) });
    const found = new DOMParser().parseFromString(await response.text(), "text/html").getElementById("found");
    if (mine !== wanted) return;
    const filters = saved().map(savedLink).filter((link) => link.textContent.includes(text));
    for (const link of filters) link.prepend(element("span", "saved filter", { className: "fine" }), " ");
    palette.querySelector("ul").replaceChildren(...found.children, ...filters.map((link) => element("li", link)));
    shown = text;
    status.textContent = `${palette.querySelectorAll("li").length} found`;
  } catch {
    if (mine === wanted) status.textContent = "The console does not answer, or you are signed out.";
  }
}

document.addEventListener("keydown", (event) => {
  if (event.key?.toLowerCase() !== "k" || !(event.ctrlKey || event.metaKey) || event.shiftKey || event.altKey) return;
  event.preventDefault();
  if (document.querySelector("dialog[open]")) return;
  palette.showModal();
  paletteText.select();
  find(0);
});

palette.addEventListener("input", () => find(150));

palette.addEventListener("submit", (event) => {
  const first = palette.querySelector("a");
  // The list of another text does not decide.
  if (!first || shown !== paletteText.value.trim()) return;
  event.preventDefault();
  first.click();
});

palette.addEventListener("keydown", (event) => {
  const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
  if (!step) return;
  event.preventDefault();
  const stops = [paletteText, ...palette.querySelectorAll("a")];
  stops.at((stops.indexOf(document.activeElement) + step) % stops.length).focus();
});

// Filters can contain what only this viewer may see.
document.querySelector("form[action='/sign-out']")?.addEventListener("submit", () => localStorage.removeItem("saved"));

enhance(document);
// On a phone, the navigation is one line that scrolls.
document.querySelector(".side [aria-current]")?.scrollIntoView({ block: "nearest", inline: "center" });
showSaved();
stayCurrent();
