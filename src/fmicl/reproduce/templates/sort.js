for (const table of document.querySelectorAll("table.sortable")) {
  const body = table.tBodies[0];
  table.tHead.querySelectorAll("th").forEach((heading, column) => {
    heading.addEventListener("click", () => {
      const up = heading.ariaSort !== "ascending";
      table.tHead.querySelectorAll("th").forEach((other) => { other.ariaSort = null; });
      heading.ariaSort = up ? "ascending" : "descending";
      const key = (row) => row.cells[column].dataset.value ?? row.cells[column].textContent.trim();
      const compare = (one, other) => {
        const [a, b] = [key(one), key(other)];
        if (a === "" || b === "") return (a === "") - (b === "");
        const [x, y] = [Number(a), Number(b)];
        const order = Number.isNaN(x) || Number.isNaN(y) ? a.localeCompare(b) : x - y;
        return up ? order : -order;
      };
      body.append(...[...body.rows].sort(compare));
    });
  });
}
