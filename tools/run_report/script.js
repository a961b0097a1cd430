"use strict";
document.documentElement.classList.add("js");

// A player shows the videos of one run together. Their panels stand side by side in each file; they are drawn one by
// one, "base" and "now" on top of each other with a line between them.
class Clip {
  constructor(figure) {
    this.video = figure.querySelector("video");
    this.video.removeAttribute("controls");
    this.fps = Number(figure.dataset.fps);
    this.frames = Number(figure.dataset.frames);
    this.wipe = 0.5;
    const panels = JSON.parse(figure.dataset.panels);
    const base = panels.find((panel) => panel.name === "base");
    const now = panels.find((panel) => panel.name === "now");
    const stage = figure.querySelector(".stage");
    this.canvases = [];
    if (base && now) this.addComparison(stage, base, now);
    else if (now) this.addPanel(stage, now, now.name);
    if (now) stage.firstElementChild.classList.add("large");
    for (const panel of panels) {
      if (panel !== now && !(now && panel === base)) this.addPanel(stage, panel, panel.name);
    }
    for (const event of ["loadeddata", "seeked"]) this.video.addEventListener(event, () => this.draw());
    if (this.video.readyState >= 2) this.draw();
    this.video.requestVideoFrameCallback?.(() => this.draw()); // the first frame may be painted after it is loaded
  }

  addPanel(stage, panel, ...labels) {
    const box = document.createElement("div");
    box.className = "panel";
    const canvas = document.createElement("canvas");
    canvas.width = panel.width;
    canvas.height = panel.height;
    canvas.setAttribute("role", "img");
    canvas.setAttribute("aria-label", labels.join(" and "));
    box.append(canvas);
    labels.filter(Boolean).forEach((label, place) => {
      const text = document.createElement("span");
      text.textContent = label;
      if (place) text.className = "right";
      box.append(text);
    });
    stage.append(box);
    const found = { canvas, panel };
    this.canvases.push(found);
    return found;
  }

  addComparison(stage, base, now) {
    const found = this.addPanel(stage, now, "before", "now");
    found.base = base;
    const canvas = found.canvas;
    canvas.parentElement.classList.add("compare");
    const drag = (event) => {
      const box = canvas.getBoundingClientRect();
      this.wipeTo((event.clientX - box.left) / box.width);
    };
    canvas.addEventListener("pointerdown", (event) => {
      canvas.setPointerCapture(event.pointerId);
      drag(event);
    });
    canvas.addEventListener("pointermove", (event) => {
      if (event.buttons) drag(event);
    });
  }

  wipeTo(share) {
    this.wipe = Math.min(1, Math.max(0, share));
    this.draw();
  }

  draw() {
    if (this.video.readyState < 2) return;
    for (const { canvas, panel, base } of this.canvases) {
      const context = canvas.getContext("2d");
      const { width, height } = canvas;
      context.drawImage(this.video, panel.x, panel.y, width, height, 0, 0, width, height);
      if (!base) continue;
      const line = Math.round(this.wipe * width);
      if (line > 0) context.drawImage(this.video, base.x, base.y, line, height, 0, 0, line, height);
      const thick = Math.max(1, Math.round(width / 160));
      if (line > 0 && line < width) {
        context.fillStyle = "#fff";
        context.fillRect(line - thick / 2, 0, thick, height);
      }
    }
  }

  seek(frame) {
    this.video.currentTime = (Math.min(frame, this.frames - 1) + 0.5) / this.fps;
  }

  get frame() {
    return Math.min(this.frames - 1, Math.floor(this.video.currentTime * this.fps + 1e-3));
  }
}

class Player {
  constructor(section) {
    const find = (name) => section.querySelector(`.controls .${name}`);
    this.section = section;
    this.clips = [...section.querySelectorAll(".clip")].map((figure) => new Clip(figure));
    this.longest = this.clips.reduce((a, b) => (b.frames / b.fps > a.frames / a.fps ? b : a));
    [this.play, this.scrub, this.output, this.rate] = ["play", "scrub", "frame", "rate"].map(find);
    this.scrub.max = this.longest.frames - 1;
    if (this.longest.frames / this.longest.fps < 1) this.rate.value = "0.25";
    this.play.addEventListener("click", () => this.toggle());
    find("back").addEventListener("click", () => this.step(-1));
    find("forward").addEventListener("click", () => this.step(1));
    this.scrub.addEventListener("input", () => this.go(Number(this.scrub.value)));
    find("wipe").addEventListener("input", (event) => {
      for (const clip of this.clips) clip.wipeTo(event.target.value / 100);
    });
    this.rate.addEventListener("change", () => this.setRate());
    this.longest.video.addEventListener("ended", () => setTimeout(() => this.playing && this.start(0), 400));
    this.go(this.longest.frames - 1); // where before and now are furthest apart: all paths begin at the source's pose
  }

  get playing() {
    return this.play.getAttribute("aria-pressed") === "true";
  }

  set playing(value) {
    this.play.setAttribute("aria-pressed", String(value));
    this.play.textContent = value ? "Pause" : "Play";
  }

  toggle() {
    if (this.playing) {
      this.stop();
      return;
    }
    this.playing = true;
    this.setRate();
    const atEnd = this.longest.frame >= this.longest.frames - 1;
    this.start(atEnd ? 0 : this.longest.video.currentTime);
    requestAnimationFrame(() => this.tick());
  }

  start(time) {
    for (const { video } of this.clips) {
      video.currentTime = Math.min(time, video.duration || time);
      video.play().catch(() => this.stop());
    }
  }

  stop() {
    this.playing = false;
    for (const { video } of this.clips) video.pause();
    this.show();
  }

  tick() {
    if (!this.playing) return;
    for (const clip of this.clips) clip.draw();
    this.show();
    requestAnimationFrame(() => this.tick());
  }

  go(frame) {
    if (this.playing) this.stop();
    const kept = Math.min(this.longest.frames - 1, Math.max(0, frame));
    for (const clip of this.clips) clip.seek(kept);
    this.show(kept);
  }

  step(count) {
    this.go(this.longest.frame + count);
  }

  setRate() {
    for (const { video } of this.clips) video.playbackRate = Number(this.rate.value);
  }

  show(frame = this.longest.frame) {
    this.scrub.value = frame;
    this.output.textContent = `${frame + 1}/${this.longest.frames}`;
  }

  get visible() {
    const box = this.section.getBoundingClientRect();
    return box.top < innerHeight - 100 && box.bottom > 100;
  }
}

const players = [...document.querySelectorAll(".player")]
  .filter((section) => section.querySelector(".clip"))
  .map((section) => new Player(section));

document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  const target = event.target;
  const player = players.find((one) => one.section.contains(target)) ?? players.find((one) => one.visible);
  if (!player) return;
  if (event.key === " " && !target.closest("button, select, summary, a")) player.toggle();
  else if (event.key === "ArrowLeft" && !target.closest("input, select")) player.step(-1);
  else if (event.key === "ArrowRight" && !target.closest("input, select")) player.step(1);
  else return;
  event.preventDefault();
});
