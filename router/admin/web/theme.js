// Light or dark: as the system has it, until the button says otherwise.

const KEY = "evenstep-theme";
const system = matchMedia("(prefers-color-scheme: dark)");

function stored() {
  try {
    return localStorage.getItem(KEY);
  } catch {
    return null; // storage may be forbidden
  }
}

function remember(theme) {
  try {
    localStorage.setItem(KEY, theme);
  } catch {
    // then it holds for this page alone
  }
}

const current = () => document.documentElement.dataset.theme;

function show(theme) {
  document.documentElement.dataset.theme = theme;
  document.dispatchEvent(new Event("themechange"));
}

export function bindThemeButton(button) {
  const other = () => (current() === "dark" ? "light" : "dark");
  const label = () => {
    button.textContent = other() === "dark" ? "Dark" : "Light";
    button.setAttribute("aria-label", `Switch to the ${other()} theme`);
  };
  button.addEventListener("click", () => {
    remember(other());
    show(other());
  });
  document.addEventListener("themechange", label);
  label();
}

system.addEventListener("change", () => {
  if (!stored()) show(system.matches ? "dark" : "light");
});
show(stored() ?? (system.matches ? "dark" : "light"));
