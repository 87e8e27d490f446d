// An expression: the texts of the page that are too close to their background (WCAG 2.1, AA), and
// how many texts it has looked at. Texts that nobody sees are left out.
(() => {
  const canvas = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  const parsed = (colour) => {
    canvas.clearRect(0, 0, 1, 1);
    canvas.fillStyle = colour;
    canvas.fillRect(0, 0, 1, 1);
    const [red, green, blue, alpha] = canvas.getImageData(0, 0, 1, 1).data;
    return [red, green, blue, alpha / 255];
  };
  const over = ([r, g, b, a], below) => [r, g, b].map((one, at) => a * one + (1 - a) * below[at]);
  const luminance = (colour) => {
    const [r, g, b] = colour.map((one) => one / 255).map((one) => (one <= 0.04045 ? one / 12.92 : ((one + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const ancestors = (at) => (at === null ? [] : [...ancestors(at.parentElement), at]);
  const background = (at) =>
    ancestors(at).reduce((below, one) => over(parsed(getComputedStyle(one).backgroundColor), below), [255, 255, 255]);
  const texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  const wrong = [];
  let looked = 0;
  while (texts.nextNode()) {
    const at = texts.currentNode.parentElement;
    const words = texts.currentNode.textContent.trim();
    if (!words || !at.checkVisibility({ opacityProperty: true, visibilityProperty: true })) continue;
    if (at.closest(".unseen, noscript, thead") && at.closest(".unseen, noscript, thead").getBoundingClientRect().width <= 1) continue;
    const style = getComputedStyle(at);
    const below = background(at);
    const opacity = ancestors(at).reduce((all, one) => all * Number(getComputedStyle(one).opacity), 1);
    const [r, g, b, a] = parsed(style.color);
    const colour = over([r, g, b, a * opacity], below);
    const [light, dark] = [luminance(colour), luminance(below)].sort((one, other) => other - one);
    const ratio = (light + 0.05) / (dark + 0.05);
    const size = parseFloat(style.fontSize);
    const isLarge = size >= 24 || (size >= 18.66 && Number(style.fontWeight) >= 700);
    looked += 1;
    if (ratio < (isLarge ? 3 : 4.5)) wrong.push(`${words.slice(0, 40)} (${at.className || at.tagName}): ${ratio.toFixed(2)}`);
  }
  return { wrong: [...new Set(wrong)], looked };
})()
