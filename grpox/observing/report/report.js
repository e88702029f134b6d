"use strict";
const controls = document.getElementById("controls");
if (controls) {
  const [batch, order, show, count, earlier, later] = ["batch", "order", "show", "count", "earlier", "later"].map(
    (id) => document.getElementById(id),
  );
  const batches = [...document.querySelectorAll(".batch")];
  const wanted = {
    all: () => true,
    best: (data) => data.extreme === "best",
    worst: (data) => data.extreme === "worst",
    up: (data) => data.advantage > 0,
    down: (data) => data.advantage < 0,
  };
  const update = () => {
    const chosen = Number(batch.value);
    batches.forEach((section, place) => (section.hidden = place !== chosen));
    const [key, sign] = order.value.split(",");
    const articles = [...batches[chosen].querySelectorAll("article")];
    // What has no number (nan) stands last in either order.
    const rank = (article) => (isNaN(article.dataset[key]) ? Infinity : sign * article.dataset[key]);
    articles.sort((a, b) => (rank(a) === rank(b) ? 0 : rank(a) - rank(b)));
    articles.forEach((article) => (article.hidden = !wanted[show.value](article.dataset)));
    batches[chosen].append(...articles);
    count.value = `${articles.filter((article) => !article.hidden).length} shown`;
    earlier.disabled = chosen === 0;
    later.disabled = chosen === batches.length - 1;
  };
  const go = (by) => {
    batch.selectedIndex += by;
    update();
  };
  earlier.addEventListener("click", () => go(-1));
  later.addEventListener("click", () => go(1));
  controls.addEventListener("change", update);
  controls.hidden = false;
  update();
}
