"use strict";
// Moves the page's marks to the cap of the slider, and writes what that cap does.
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
  for (const place of all("[data-text]")) {
    const texts = data.texts[place.dataset.text];
    moves.push((i) => { place.textContent = texts[i]; });
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
})();
