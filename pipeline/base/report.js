const value = ([low, high, log], position) => log ? low * (high / low) ** position : low + (high - low) * position
for (const figure of document.querySelectorAll("figure[data-x]")) {
  const [x, y] = [figure.dataset.x, figure.dataset.y].map(text => text.split(" ").map(Number))
  const svg = figure.querySelector("svg"), output = figure.querySelector("output"), round = n => +n.toPrecision(4)
  svg.onpointerleave = () => { output.textContent = "" }
  svg.onpointermove = event => {
    const box = svg.getBoundingClientRect(), style = getComputedStyle(svg), left = parseFloat(style.paddingLeft)
    const at = 1000 * (event.clientX - box.left - left) / (box.width - left - parseFloat(style.paddingRight))
    const near = [...svg.querySelectorAll("polyline")].map(line => [line.textContent,
      [...line.points].reduce((best, p) => Math.abs(p.x - at) < Math.abs(best.x - at) ? p : best)])
    output.textContent = near.slice(0, 8).map(([name, p]) =>
      `${name} ${round(value(y, 1 - p.y / 1000))} at ${round(value(x, p.x / 1000))}`).join(" · ")
  }
}
