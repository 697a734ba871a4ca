// Elements in one line; text is only ever set as text.

export const byId = (id) => document.getElementById(id);

export function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value != null) made.setAttribute(name, value);
  }
  made.append(...children);
  return made;
}

export function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

// Rows of a table, cells kept: what is focused or selected stays so.
export function fillRows(body, rows) {
  while (body.rows.length > rows.length) body.deleteRow(-1);
  rows.forEach((cells, i) => {
    const row = body.rows[i] ?? body.insertRow();
    while (row.cells.length > cells.length) row.deleteCell(-1);
    cells.forEach((text, j) => {
      const cell = row.cells[j] ?? row.appendChild(document.createElement(j ? "td" : "th"));
      if (!j) cell.scope = "row";
      setText(cell, text);
    });
  });
}

export function fillHead(head, names) {
  head.replaceChildren(element("tr", {}, ...names.map((name) => element("th", { scope: "col" }, name))));
}

// Names and values; the values change.
export function fillReadout(list, rows) {
  if (list.children.length !== rows.length) {
    list.replaceChildren(...rows.map(([name]) => element("div", {}, element("dt", {}, name), element("dd"))));
  }
  rows.forEach(([, value], i) => setText(list.children[i].querySelector("dd"), value));
}
