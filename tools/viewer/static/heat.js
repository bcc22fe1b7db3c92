// Heatmaps: bytes from the server, coloured here. The canvas has one pixel per cell; the browser scales it.

// Inferno without its darkest colours, as `bigscl render` draws it: every 16th of 0.3 to 1.
const STOPS = [
  [106, 23, 110], [125, 30, 109], [143, 36, 105], [160, 42, 99], [177, 50, 90], [193, 58, 80], [210, 70, 68],
  [223, 83, 55], [234, 99, 42], [242, 116, 28], [248, 135, 14], [251, 157, 7], [252, 178, 22], [249, 199, 47],
  [244, 221, 79], [241, 241, 121], [252, 255, 164],
];

const COLORS = Array.from({ length: 256 }, (_, value) => {
  const place = (value / 255) * (STOPS.length - 1);
  const low = Math.min(STOPS.length - 2, Math.floor(place));
  return STOPS[low].map((one, channel) => one + (STOPS[low + 1][channel] - one) * (place - low));
});

export function bytes(text) {
  return Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
}

export function paint(canvas, heat, side) {
  canvas.width = canvas.height = side;
  const context = canvas.getContext("2d");
  const image = context.createImageData(side, side);
  for (let cell = 0; cell < side * side; cell += 1) {
    const value = heat ? heat[cell] : 0;
    image.data.set(COLORS[value], 4 * cell);
    // The image shows through strong heat too; weak heat is visible, but not mistaken for strong.
    image.data[4 * cell + 3] = 255 * Math.sqrt(value / 255);
  }
  context.putImageData(image, 0, 0);
}

export function hottest(heat, side) {
  let best = 0;
  for (let cell = 1; cell < side * side; cell += 1) if (heat[cell] > heat[best]) best = cell;
  return heat[best] ? { x: ((best % side) + 0.5) / side, y: (Math.floor(best / side) + 0.5) / side } : null;
}
