"use strict";
// Moves the page's marks to the cap of the slider, writes what that cap does, and shows the values under the pointer.
// All numbers and words come from the page's data; nothing is computed here but places on the screen.
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const slider = document.getElementById("cap");
  const all = (selector) => [...document.querySelectorAll(selector)];

  const scale = (text) => {
    const [kind, low, high, start, end] = text.split(" ").map((part, i) => (i ? Number(part) : part));
    const grown = kind === "log" ? Math.log : (v) => v;
    return (value) => {
      const at = Math.min(Math.max(value, low), high);
      const part = high > low ? (grown(at) - grown(low)) / (grown(high) - grown(low)) : 0.5;
      return start + (end - start) * part;
    };
  };

  const level = (name, index) => {
    const [list, row] = name.split(" ");
    return data.levels[data[list][Number(row)][index]];
  };

  // Every mark: a function that moves it to the cap at an index.
  const moves = [];
  for (const mark of all("g.cap[data-x]")) {
    const x = scale(mark.dataset.x);
    moves.push((i) => mark.setAttribute("transform", `translate(${x(data.caps[i]).toFixed(1)} 0)`));
  }
  for (const dot of all("[data-series]")) {
    const x = scale(dot.dataset.x), y = scale(dot.dataset.y), values = data.series[dot.dataset.series];
    moves.push((i) => dot.setAttribute("transform", `translate(${x(data.caps[i]).toFixed(1)} ${y(values[i]).toFixed(1)})`));
  }
  for (const name of all("[data-cap-x]")) {
    const x = scale(name.dataset.capX), width = name.ownerSVGElement.viewBox.baseVal.width;
    moves.push((i) => {
      name.textContent = `cap ${data.texts.cap[i]}`;
      const half = name.textContent.length * 4.3;
      name.setAttribute("x", Math.min(Math.max(x(data.caps[i]), half), width - half).toFixed(1));
    });
  }
  for (const bar of all("[data-bar]")) {
    const y = scale(bar.dataset.y), foot = y(0);
    moves.push((i) => {
      const top = y(level(bar.dataset.bar, i)[0]);
      bar.setAttribute("y", top.toFixed(1));
      bar.setAttribute("height", (foot - top).toFixed(1));
    });
  }
  for (const bar of all("[data-row]")) {
    const x = scale(bar.dataset.x), left = x(0);
    moves.push((i) => bar.setAttribute("width", (x(level(bar.dataset.row, i)[0]) - left).toFixed(1)));
  }
  for (const words of all("[data-row-text]")) {
    const x = scale(words.dataset.x);
    moves.push((i) => {
      const [value, text] = level(words.dataset.rowText, i);
      words.textContent = text;
      words.setAttribute("x", (x(value) + 6).toFixed(1));
    });
  }
  for (const place of all("[data-text]")) {
    const texts = data.texts[place.dataset.text];
    moves.push((i) => { place.textContent = texts[i]; });
  }

  const tips = new Map();
  for (const hit of all(".hit, .cell")) {
    const title = hit.querySelector("title");
    if (!title) continue;
    tips.set(hit, title.textContent);
    title.remove(); // the browser's own would be shown beside ours
  }
  for (const hit of all("[data-tip]")) {
    const begin = tips.get(hit).split(": ")[0];
    moves.push((i) => tips.set(hit, `${begin}: ${level(hit.dataset.tip, i)[1]} ${data.tip}`));
  }

  const show = () => {
    const index = Number(slider.value);
    slider.setAttribute("aria-valuetext", data.texts.sentence[index]);
    for (const move of moves) move(index);
  };
  slider.form.hidden = false;
  slider.value = data.start;
  slider.addEventListener("input", show);
  slider.form.addEventListener("submit", (event) => event.preventDefault());
  slider.form.addEventListener("reset", (event) => {
    event.preventDefault();
    slider.value = data.start;
    show();
  });
  show();

  const tip = document.getElementById("tip");
  const showTip = (event) => {
    const words = tips.get(event.target);
    tip.hidden = words === undefined;
    if (tip.hidden) return;
    tip.textContent = words;
    const { width, height } = tip.getBoundingClientRect();
    const right = document.documentElement.clientWidth - width - 6;
    tip.style.left = `${Math.max(6, Math.min(event.clientX + 14, right))}px`;
    tip.style.top = `${event.clientY - height - 12 < 4 ? event.clientY + 18 : event.clientY - height - 12}px`;
  };
  for (const kind of ["pointermove", "pointerdown"]) document.addEventListener(kind, showTip);
  document.addEventListener("scroll", () => { tip.hidden = true; }, { passive: true });
})();
