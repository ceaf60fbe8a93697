// Shows openapi.json. Text is inserted as text, never as markup.
"use strict";

function element(name, className, text) {
  const node = document.createElement(name);
  if (className) node.className = className;
  if (text !== undefined) node.textContent = text;
  return node;
}

function operation(path, method, described, schemas) {
  const item = element("section", "card");
  item.append(element("h2", "", `${method.toUpperCase()} ${path}`));
  item.append(element("p", "text", (described.description || described.summary || "").replaceAll("``", "")));
  const body = described.requestBody?.content?.["application/json"]?.schema;
  for (const reference of [body, ...(body?.anyOf ?? [])]) {
    const name = reference?.$ref?.split("/").pop();
    if (!name || !schemas[name]) continue;
    const list = element("ul");
    for (const [field, schema] of Object.entries(schemas[name].properties ?? {})) {
      const isRequired = schemas[name].required?.includes(field);
      const line = element("li");
      line.append(element("code", "", field), `${isRequired ? " (required)" : ""} ${(schema.description ?? "").replaceAll("``", "")}`);
      list.append(line);
    }
    item.append(element("p", "about", name), list);
  }
  return item;
}

async function show() {
  const main = document.getElementById("operations");
  const token = sessionStorage.getItem("token");
  const headers = token ? { authorization: `Bearer ${token}` } : {};
  const response = await fetch("openapi.json", { headers });
  if (!response.ok) {
    main.replaceChildren(element("p", "", response.status === 401
      ? "This service needs a token; enter it on the first page." : `status ${response.status}`));
    return;
  }
  const description = await response.json();
  main.replaceChildren(...Object.entries(description.paths).flatMap(([path, methods]) =>
    Object.entries(methods).map(([method, described]) =>
      operation(path, method, described, description.components?.schemas ?? {}))));
}

show();
