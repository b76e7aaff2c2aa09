"use strict";
// Shows the checkboxes of drafts, and writes the keys of the chosen ones into the command.
for (const drafts of document.querySelectorAll(".drafts")) {
  const boxes = [...drafts.querySelectorAll("input[type=checkbox]")];
  const keys = drafts.querySelector(".keys");
  const status = drafts.querySelector("[role=status]");
  const button = drafts.querySelector("button");
  const command = drafts.querySelector("pre code");

  const show = () => {
    const chosen = boxes.filter((box) => box.checked).map((box) => box.value);
    keys.textContent = chosen.join(",") || "KEY,KEY";
    button.disabled = chosen.length === 0;
    button.textContent = "Copy";
    const drafts = chosen.length === 1 ? "1 draft" : `${chosen.length} drafts`;
    status.textContent = chosen.length
      ? `This finishes ${drafts}:`
      : "Choose drafts; this command then finishes them:";
  };

  // Pages in files have no clipboard in some browsers: then the command is selected.
  const copy = async () => {
    try {
      await navigator.clipboard.writeText(command.textContent);
      button.textContent = "Copied";
    } catch {
      getSelection().selectAllChildren(command);
      button.textContent = "Selected";
    }
  };

  for (const box of boxes) {
    box.hidden = false;
    box.addEventListener("change", show);
  }
  button.hidden = false;
  button.addEventListener("click", copy);
  show();
}
