// A phone has no pointer that rests on a bar to show its title, so the bar that is touched is described below all.
var chosen = null;
document.getElementById("timeline").addEventListener("click", function (event) {
  var title = event.target.querySelector ? event.target.querySelector("title") : null;
  if (!title || event.target.tagName !== "rect") return;
  if (chosen) chosen.classList.remove("chosen");
  chosen = event.target;
  chosen.classList.add("chosen");
  var row = chosen.parentNode.getAttribute("aria-label").replace("operations of ", "");
  var about = document.getElementById("about");
  about.textContent = row + "\n" + title.textContent;
  about.classList.add("shown");
});
