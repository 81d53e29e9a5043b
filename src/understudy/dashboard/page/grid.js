// Grid: a scrolled grid that holds only the visible cards. Cards are reused; rows are fetched in pages.

import { h } from "./dom.js";

const PAGE = 60, KEPT_PAGES = 100, GAP = 12, AHEAD_ROWS = 2, SETTLE_MS = 30, MARGIN = 130; // of the head that stays above the cards

export class Grid {
  // fetchPage(offset, limit) gives { rows, total, ... }; makeCard() a node; fillCard(node, row, settled) fills it.
  constructor({ scroller, fetchPage, makeCard, fillCard, minWidth = 150, foot = 52, ratio = 0.8 }) {
    Object.assign(this, { scroller, fetchPage, makeCard, fillCard, minWidth, foot, ratio });
    this.node = h("div", { class: "grid", role: "list", "aria-label": "Episodes", onkeydown: (event) => this.key(event) });
    this.pages = new Map();
    this.requested = new Set();
    this.cards = new Map();
    this.spare = [];
    this.total = 0;
    this.turn = 0;
    this.onscroll = () => this.draw();
    scroller.addEventListener("scroll", this.onscroll, { passive: true });
    this.sizes = new ResizeObserver(() => this.measure());
    this.sizes.observe(this.node);
    this.sizes.observe(scroller); // a phone that is turned shows more or fewer rows
  }

  close() {
    this.sizes.disconnect();
    this.scroller.removeEventListener("scroll", this.onscroll);
    clearTimeout(this.settling);
  }

  // Fetch the list again; the present cards stay until the first page has arrived.
  async reset() {
    const turn = ++this.turn;
    const first = Math.floor(this.firstVisible() / PAGE);
    const pages = await Promise.all([...new Set([0, first])].map(async (number) => [number, await this.fetchPage(number * PAGE, PAGE)]));
    if (turn !== this.turn) return null;
    this.pages = new Map(pages.map(([number, data]) => [number, data.rows]));
    this.requested.clear();
    this.total = pages[0][1].total;
    this.measure();
    return pages[0][1];
  }

  row(index) {
    return this.pages.get(Math.floor(index / PAGE))?.[index % PAGE];
  }

  firstVisible() {
    return this.columns ? Math.max(0, Math.floor(this.above() / this.high) * this.columns) : 0;
  }

  above() {
    return this.scroller.getBoundingClientRect().top - this.node.getBoundingClientRect().top;
  }

  measure() {
    const width = this.node.clientWidth;
    if (!width) return;
    this.columns = Math.max(2, Math.floor((width + GAP) / (this.minWidth + GAP)));
    this.wide = (width - GAP * (this.columns - 1)) / this.columns;
    this.high = Math.round(this.wide * this.ratio) + this.foot + GAP;
    this.node.style.height = `${Math.ceil(this.total / this.columns) * this.high}px`;
    this.node.style.setProperty("--pic", `${Math.round(this.wide * this.ratio)}px`);
    this.draw(true);
  }

  draw(all) {
    if (!this.columns) return;
    const above = this.above(), view = this.scroller.clientHeight;
    const first = Math.max(0, (Math.floor(above / this.high) - AHEAD_ROWS) * this.columns);
    const stop = Math.min(this.total, (Math.ceil((above + view) / this.high) + AHEAD_ROWS) * this.columns);
    const fast = Math.abs(above - (this.before ?? above)) > view;
    this.before = above;
    for (const [index, card] of this.cards) {
      if (index < first || index >= stop) { this.cards.delete(index); card.remove(); this.fillCard(card, null, false); this.spare.push(card); } // cancels the load of its image
    }
    for (let index = stop - 1; index >= first; index--) { // the next card is there already: cards are in order for the tab key
      let card = this.cards.get(index);
      const fresh = !card;
      if (fresh) {
        card = this.spare.pop() ?? this.makeCard();
        this.cards.set(index, card);
        this.node.insertBefore(card, this.cards.get(index + 1) ?? null);
      }
      if (fresh || all) {
        card.style.width = `${this.wide}px`;
        card.style.height = `${this.high - GAP}px`;
        card.style.transform = `translate(${(index % this.columns) * (this.wide + GAP)}px, ${Math.floor(index / this.columns) * this.high}px)`;
      }
      if (fresh || all || card.waiting) this.fill(index, card, !fast);
    }
    clearTimeout(this.settling);
    if (fast) this.settling = setTimeout(() => { for (const [index, card] of this.cards) this.fill(index, card, true); }, SETTLE_MS);
  }

  fill(index, card, settled) {
    const row = this.row(index);
    card.waiting = !row;
    card.index = index;
    this.fillCard(card, row, settled);
    if (!row && settled) this.loadPage(Math.floor(index / PAGE));
  }

  async loadPage(number) {
    if (this.requested.has(number)) return;
    this.requested.add(number);
    const turn = this.turn;
    try {
      const data = await this.fetchPage(number * PAGE, PAGE);
      if (turn !== this.turn) return;
      this.pages.set(number, data.rows);
      while (this.pages.size > KEPT_PAGES) this.pages.delete(this.pages.keys().next().value);
      this.draw();
    } catch { /* requested again when it is visible again */ } finally { this.requested.delete(number); }
  }

  // The arrow keys move from card to card.
  key(event) {
    const card = [...this.cards.values()].find((one) => one === document.activeElement);
    const by = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: this.columns, ArrowUp: -this.columns }[event.key];
    const to = card ? card.index + by : NaN;
    if (!(to >= 0 && to < this.total)) return;
    event.preventDefault();
    const top = Math.floor(to / this.columns) * this.high, above = this.above(), view = this.scroller.clientHeight;
    if (top < above + MARGIN) this.scroller.scrollTop -= above + MARGIN - top;
    else if (top + this.high > above + view) this.scroller.scrollTop += top + this.high - above - view;
    this.draw();
    this.cards.get(to)?.focus({ preventScroll: true });
  }

  refresh() {
    for (const [index, card] of this.cards) this.fill(index, card, true);
  }
}
