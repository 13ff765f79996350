// Names for controls of the theme that have none, or other ones than they show; a keyboard reaches tables that scroll.
document.addEventListener("DOMContentLoaded", () => {
  document.querySelectorAll("nav details > summary").forEach((summary) => {
    const link = summary.closest("li")?.querySelector("a");
    summary.setAttribute("aria-label", `pages below ${link ? link.textContent.trim() : ""}`);
  });
  document.querySelectorAll(".search-button-field").forEach((button) => button.removeAttribute("aria-label"));
  document.querySelectorAll(".version-switcher__button").forEach((button) => button.removeAttribute("aria-label"));
  const brand = document.querySelector(".bd-sidebar-primary .navbar-brand")?.parentElement;
  brand?.setAttribute("role", "region");
  brand?.setAttribute("aria-label", "lutjax, start page");
  const tables = document.querySelectorAll(".pst-scrollable-table-container");
  const reach = () => tables.forEach((table) => (table.tabIndex = table.scrollWidth > table.clientWidth ? 0 : -1));
  reach();
  addEventListener("resize", reach);
  // Excerpts of search results begin with the text of a page, not with the theme's buttons and contents.
  if (typeof Search !== "undefined") {
    const textOf = Search.htmlToText;
    Search.htmlToText = (html, anchor) => {
      const page = new DOMParser().parseFromString(html, "text/html");
      const chrome = ".bd-header-article, .bd-sidebar-secondary, .prev-next-footer, .bd-footer, #jb-print-docs-body";
      page.querySelectorAll(chrome).forEach((part) => part.remove());
      return textOf(page.documentElement.outerHTML, anchor);
    };
  }
  // Frames are as high as their pages, which a browser only tells of pages of the same server.
  document.querySelectorAll("iframe.gallery-frame").forEach((frame) => {
    const fit = () => {
      const body = frame.contentDocument?.body;
      if (!body?.childElementCount) return;
      const resize = () => (frame.style.height = `${body.offsetHeight + 2}px`);
      new ResizeObserver(resize).observe(body);
      resize();
    };
    frame.addEventListener("load", fit);
    fit();
  });
});
