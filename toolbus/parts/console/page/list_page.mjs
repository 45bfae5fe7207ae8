// Draws a page of a list: its head with the filter, its rows, and beside it what is open.

import { Filter } from "./filter.mjs";
import { html } from "./html.mjs";
import { Failed, Nothing, Reading } from "./parts.mjs";
import { Rows } from "./rows.mjs";
import { connection } from "./store.mjs";

/**
 * Draws a list, and beside it the detail, if one is open.
 *
 * title: of the page. one: what a row is, in a word. count: text beside the filter. aside: what else stands there; below:
 * what stands below that. error: why the list is not as it is now. known: whether there is a list. columns: the class
 * that says how wide the columns are; heads: what stands above them. narrowed: whether there would be rows without the
 * filter; hint: what to do then; none: what is drawn where there would not. label, items, id, row, selected, onOpen: of `Rows`.
 */
export function ListPage({ title, one, count = null, aside, below, error, known = true, columns, heads, narrowed, hint = "Remove a part of the filter.", none, detail, label = title, ...rows }) {
  return html`<section class="list">
      <div class="head">
        <div class="toolbar"><h1>${title}</h1><${Filter} label=${`Filter ${one}s`} count=${count} />${aside}</div>
        ${below}
        <${Failed} error=${error} what="The list" />
      </div>
      <div class=${"columns " + columns}>${heads}</div>
      <${Rows} ...${rows} label=${label} columns=${columns} empty=${html`<${Empty} of=${{ one, error, known, narrowed, hint, none }} />`} />
    </section>
    ${detail && html`<section class="detail" aria-label="Details">${detail}</section>`}`;
}

function Empty({ of: { one, error, known, narrowed, hint, none } }) {
  if (narrowed && known) return html`<${Nothing} title=${`No such ${one}`}>${hint}<//>`;
  if (known && connection.value === "live") return none;
  return error && connection.value === "live" ? html`<${Nothing} title="Nothing is known" />` : html`<${Reading} />`;
}
