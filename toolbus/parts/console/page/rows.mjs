// Draws a long list as the few rows that are in sight, by absolute position.

import { html, useEffect, useRef, useState } from "./html.mjs";
import { useKeys } from "./keys.mjs";

const HEIGHT = 30; // of a row, as in style.css
const MAX_DRAWN = 60;
const AROUND = 6; // rows above and below what is in sight

/** Returns which rows to draw: [first, end), at most `most`. */
export function windowOf(count, height, top, room, most = MAX_DRAWN) {
  const sight = Math.ceil(room / height) + 1;
  const drawn = Math.min(most, sight + 2 * AROUND);
  const above = Math.max(0, (drawn - sight) >> 1);
  const first = Math.min(Math.max(0, Math.floor(top / height) - above), Math.max(0, count - drawn));
  return [first, Math.min(count, first + drawn)];
}

/** Returns where to scroll so that a row is in sight: nowhere if it is, else to its nearer end, or to put it in the middle. */
export function revealed(index, height, top, room, middle = false) {
  const at = index * height;
  if (at >= top && at + height <= top + room) return top;
  if (middle) return Math.max(0, at - (room - height) / 2);
  return at < top ? at : at + height - room;
}

/**
 * Draws a list.
 *
 * items: everything, in order. id: item → its text id (`key` never reaches a component). row: item → content.
 * selected: id of the open item. onOpen: item → void. empty: what to draw if there is none. label: for screen readers.
 * columns: the class that says how wide they are.
 */
export function Rows({ items, id, row, selected = "", onOpen, empty, label, columns }) {
  const box = useRef(null);
  const [view, setView] = useState({ top: 0, room: 600 });
  const [cursor, drawCursor] = useState(selected);
  const newest = useRef(selected); // the cursor, also before it is drawn: keys may come faster than frames
  const [first, end] = windowOf(items.length, HEIGHT, view.top, view.room);
  const at = items.findIndex((item) => id(item) === cursor);

  useEffect(() => {
    const element = box.current; // the observer may report once more when the list has gone
    const watcher = new ResizeObserver(() => setView({ top: element.scrollTop, room: element.clientHeight }));
    watcher.observe(element);
    return () => watcher.disconnect();
  }, []);
  const chosen = selected ? items.findIndex((item) => id(item) === selected) : -1;
  useEffect(() => {
    if (chosen < 0) return; // not there yet
    setCursor(selected);
    reveal(chosen, true);
  }, [selected, chosen < 0]);

  const setCursor = (name) => {
    newest.current = name;
    drawCursor(name);
  };
  const reveal = (index, middle) => {
    const element = box.current;
    if (index >= 0 && element) element.scrollTop = revealed(index, HEIGHT, element.scrollTop, element.clientHeight, middle);
  };
  const move = (step) => () => {
    if (!items.length) return false;
    const from = items.findIndex((item) => id(item) === newest.current);
    const next = Math.min(items.length - 1, Math.max(0, from < 0 && Number.isFinite(step) ? 0 : from + step));
    setCursor(id(items[next]));
    reveal(next);
  };
  const open = () => {
    const item = items.find((each) => id(each) === newest.current) ?? items[0];
    if (!item) return false;
    setCursor(id(item));
    onOpen(item);
  };
  useKeys(
    { "j ArrowDown": move(1), "k ArrowUp": move(-1), Home: move(-Infinity), End: move(Infinity), Enter: open },
    { "j k ArrowDown ArrowUp": "move in the list", "Home End": "first and last row", Enter: "open the row" },
  );

  return html`<div
    class="rows"
    ref=${box}
    role="listbox"
    tabindex="0"
    aria-label=${label}
    aria-activedescendant=${at >= first && at < end ? `row-${at}` : undefined}
    onScroll=${(event) => setView({ top: event.currentTarget.scrollTop, room: event.currentTarget.clientHeight })}
  >
    ${items.length
      ? html`<div class="space" role="presentation" style=${{ height: items.length * HEIGHT + "px" }}>
          ${items.slice(first, end).map((item, offset) => {
            const name = id(item);
            const index = first + offset;
            return html`<div
              key=${name}
              id=${`row-${index}`}
              class=${["row", columns, index === at && "cursor", name === selected && "selected"].filter(Boolean).join(" ")}
              role="option"
              aria-selected=${name === selected ? "true" : "false"}
              aria-posinset=${index + 1}
              aria-setsize=${items.length}
              style=${{ top: index * HEIGHT + "px" }}
              onClick=${() => {
                setCursor(name);
                onOpen(item);
              }}
            >
              ${row(item)}
            </div>`;
          })}
        </div>`
      : html`<div class="empty">${empty ?? "Nothing yet."}</div>`}
  </div>`;
}
