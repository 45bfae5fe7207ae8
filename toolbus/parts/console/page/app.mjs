// Draws the page around the pages: header, navigation, keys; starts everything.

import { unauthorized } from "./api.mjs";
import { Dialog, Dialogs } from "./dialogs.mjs";
import { html, render, useEffect, useRef, useState } from "./html.mjs";
import { helpIsOpen, helpOfKeys, Keys, startKeys, useKeys } from "./keys.mjs";
import { page as busPage } from "./pages/bus.mjs";
import { page as callsPage } from "./pages/calls.mjs";
import { page as councilPage } from "./pages/council.mjs";
import { page as errorsPage } from "./pages/errors.mjs";
import { page as logsPage } from "./pages/logs.mjs";
import { page as overviewPage } from "./pages/overview.mjs";
import { page as permissionsPage } from "./pages/permissions.mjs";
import { page as sourcesPage } from "./pages/sources.mjs";
import { page as tasksPage } from "./pages/tasks.mjs";
import { page as toolsPage } from "./pages/tools.mjs";
import { go, HOME, link, route, startRouter } from "./router.mjs";
import { Sparkline } from "./sparkline.mjs";
import { bus, connection, login, lost, may, me, rates, trouble } from "./store.mjs";
import { exchangeCode, startCatalog, startStream } from "./stream.mjs";
import { count } from "./text.mjs";

// In the order of the navigation. A page with a `verb`, or several, is for those who may use one.
const PAGES = [
  overviewPage,
  sourcesPage,
  toolsPage,
  callsPage,
  errorsPage,
  logsPage,
  permissionsPage,
  tasksPage,
  councilPage,
  busPage,
];

const allowed = () => PAGES.filter(({ verb }) => !verb || [verb].flat().some(may));
const STATES = { live: "live", connecting: "connecting", lost: "connection lost" };
const KINDS = { live: "ok", connecting: "busy", lost: "bad" };

function App() {
  return login.value !== null ? html`<${Login} why=${login.value} />` : html`<${Frame} />`;
}

function Frame() {
  const pages = allowed();
  const { page: name, parts, query } = route.value;
  const page = pages.find((each) => each.name === name);
  return html`
    <a class="skip" href="#main" onClick=${toMain}>To the page</a>
    <${Header} />
    <${Pages} pages=${pages} page=${page} />
    <main id="main" tabindex="-1" class=${parts.length ? "main open" : "main"}>
      ${page
        ? html`<${page.view} key=${page.name} parts=${parts} query=${query} />`
        : me.value && html`<div class="empty"><h3>There is no page “${name}” for you</h3></div>`}
    </main>
    <${Footer} />
    <${Dialogs} />
    ${helpIsOpen.value && html`<${Help} pages=${pages} />`}
  `;
}

/** Draws the navigation; on a phone it scrolls, and an arrow shows that there are more pages on that side. */
function Pages({ pages, page }) {
  const bar = useRef(null);
  const [more, setMore] = useState({ before: false, after: false });
  const look = () => {
    const { scrollLeft, clientWidth, scrollWidth } = bar.current;
    setMore({ before: scrollLeft > 1, after: scrollLeft + clientWidth < scrollWidth - 1 });
  };
  useEffect(() => {
    const watcher = new ResizeObserver(look);
    watcher.observe(bar.current);
    return () => watcher.disconnect();
  }, []);
  useEffect(() => {
    bar.current.querySelector("[aria-current]")?.scrollIntoView({ block: "nearest", inline: "center" });
    look();
  }, [page, pages.length]); // there are more pages once it is known what one may do
  const turn = (by) => () => bar.current.scrollBy({ left: by * bar.current.clientWidth * 0.8, behavior: "smooth" });
  return html`<div class="pages-bar">
    <nav class="pages" aria-label="Pages" ref=${bar} onScroll=${look}>
      ${pages.map(
        (each) =>
          html`<a key=${each.name} href=${link(each.name)} aria-current=${each === page ? "page" : undefined}>
            <span>${each.title}</span><kbd>${each.key}</kbd>
          </a>`,
      )}
    </nav>
    ${more.before && html`<button type="button" class="more before" tabindex="-1" aria-label="Pages before these" onClick=${turn(-1)}>‹</button>`}
    ${more.after && html`<button type="button" class="more after" tabindex="-1" aria-label="More pages" onClick=${turn(1)}>›</button>`}
  </div>`;
}

function toMain(event) {
  event.preventDefault();
  document.getElementById("main").focus();
}

function Header() {
  const state = connection.value;
  const { bus_id, draining, stuck, version } = bus.value;
  const { rate, in_flight } = state === "live" ? bus.value : {}; // what it does now is not known without a connection
  return html`<div class="above">
    <header class="top">
      <a class="brand cut" href=${link(HOME)}>toolbus <span class="muted" title=${bus_id}>${me.value?.home || bus_id}</span></a>
      <span class=${`state ${KINDS[state]}`} role="status"><span class=${`dot ${KINDS[state]}`}></span>${STATES[state]}</span>
      ${draining && html`<span class="chip warn">draining</span>`}
      ${lost.value > 0 && html`<span class="chip warn opt" title="calls that ended too fast to be recorded">${lost} not shown</span>`}
      <span class="spring"></span>
      <span class="pulse opt"><${Sparkline} values=${rates.value} label="calls a second, the newest 60 readings" /></span>
      <span class="pulse"><span class="num">${count(rate)}</span> calls/s</span>
      <span class="pulse"><span class="num">${count(in_flight)}</span> in flight</span>
      ${stuck > 0 && html`<span class="chip bad" title="calls that were given up and still run">${count(stuck)} stuck</span>`}
      <span class="muted opt">${version}</span>
    </header>
    ${state === "lost" &&
    html`<div class="banner bad" role="alert">
      ${trouble.value || "The bus does not answer. This page goes on by itself when it is back."}
    </div>`}
  </div>`;
}


function Footer() {
  useKeys({
    Escape: () => {
      const { page, parts, query } = route.value;
      if (!parts.length) return false;
      go(page, [], query); // a detail has one part or several
    },
  });
  return html`<footer class="keys">
    <span><kbd>/</kbd> filter</span> <span><kbd>j</kbd> <kbd>k</kbd> rows</span> <span><kbd>Enter</kbd> open</span>
    <span><kbd>Esc</kbd> back</span> <span><kbd>g</kbd> and a letter: page</span>
    <button type="button" class="plain" onClick=${() => (helpIsOpen.value = true)}><kbd>?</kbd> all keys</button>
  </footer>`;
}

function Help({ pages }) {
  const rows = [
    ...pages.map(({ key, title }) => ["g " + key, title]),
    ["/", "filter the list"],
    ["Escape", "back; leave a field"],
    ["?", "this list"],
    ...helpOfKeys(),
  ];
  return html`<${Dialog} title="Keys" onClose=${() => (helpIsOpen.value = false)}>
    <dl class="key-list">
      ${rows.map(([keys, words]) => html`<dt><${Keys} of=${keys} /></dt><dd>${words}</dd>`)}
    </dl>
    <form method="dialog" class="acts"><button autofocus>Close</button></form>
  <//>`;
}

function Login({ why }) {
  return html`<main class="main"><div class="empty">
    <h3>${why}</h3>
    <p>
      To look at this bus, open the console from a machine that has a key for it. The command opens the browser with a
      code that is good for one minute, once:
    </p>
    <pre>toolbus console --bus ${location.origin} --credential FILE</pre>
    <p class="muted">
      Without a browser on that machine, add <code>--print</code> and open the address that it prints here.
    </p>
  </div></main>`;
}

async function start() {
  await exchangeCode();
  startRouter(({ page }) => `${PAGES.find(({ name }) => name === page)?.title ?? page} · toolbus`);
  startKeys(allowed, ({ name }) => go(name));
  unauthorized.heard = () => {
    login.value ??= "You are not logged in here, or not any more.";
  };
  render(html`<${App} />`, document.getElementById("app"));
  if (login.value !== null) return;
  startCatalog();
  await startStream();
}

start();
