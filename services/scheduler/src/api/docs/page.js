"use strict";

// Shows the OpenAPI document of this server. All texts are set as text, never as HTML.

function element(name, content, className) {
  const made = document.createElement(name);
  if (className) made.className = className;
  for (const part of [].concat(content ?? [])) made.append(part);
  return made;
}

function table(heads, rows) {
  const head = element("tr", heads.map((text) => element("th", text)));
  return element("table", [head, ...rows.map((row) => element("tr", row.map((cell) => element("td", cell))))]);
}

function type(schema) {
  if (!schema) return "";
  if (schema.$ref) {
    const name = schema.$ref.split("/").pop();
    const link = element("a", name);
    link.href = "#" + name;
    return link;
  }
  if (schema.enum) return schema.enum.join(" or ");
  if (schema.items) return element("span", ["array of ", type(schema.items)]);
  const variants = schema.oneOf ?? schema.anyOf ?? schema.allOf;
  if (variants) return element("span", variants.flatMap((one, index) => (index ? [" or ", type(one)] : [type(one)])));
  return [].concat(schema.type ?? "any").join(" or ");
}

function contents(content) {
  return Object.entries(content ?? {}).map(([kind, media]) =>
    element("div", [element("code", kind), " ", type(media.schema)]));
}

function operation(path, method, described) {
  const summary = element("summary", [element("span", method, "method"), element("code", path), " ", described.summary ?? ""]);
  const parts = [summary, element("p", described.description ?? "")];
  if (described.parameters) {
    parts.push(table(["Parameter", "In", "Type", "Meaning"], described.parameters.map((parameter) =>
      [element("code", parameter.name), parameter.in, type(parameter.schema), parameter.description ?? ""])));
  }
  if (described.requestBody) parts.push(element("p", ["Body: ", ...contents(described.requestBody.content)]));
  parts.push(table(["Status", "Meaning", "Content"], Object.entries(described.responses).map(([status, response]) =>
    [status, response.description, contents(response.content)])));
  return element("details", parts);
}

function schema(name, described) {
  const heading = element("h3", name);
  heading.id = name;
  if (described.enum) return [heading, element("p", described.description ?? ""), element("p", type(described))];
  const required = new Set(described.required ?? []);
  const rows = Object.entries(described.properties ?? {}).map(([field, of]) =>
    [element("code", field), type(of), required.has(field) ? "yes" : "", of.description ?? ""]);
  return [heading, element("p", described.description ?? ""), table(["Field", "Type", "Required", "Meaning"], rows)];
}

async function show() {
  const page = document.getElementById("page");
  const response = await fetch("/v1/openapi.json");
  const api = await response.json();
  const link = element("a", "openapi.json");
  link.href = "/v1/openapi.json";
  const parts = [element("h1", api.info.title), element("p", api.info.description), element("p", link)];
  for (const [path, item] of Object.entries(api.paths)) {
    for (const [method, described] of Object.entries(item)) parts.push(operation(path, method, described));
  }
  parts.push(element("h2", "Schemas"));
  for (const [name, described] of Object.entries(api.components.schemas)) parts.push(...schema(name, described));
  page.replaceChildren(...parts);
}

show().catch((error) => document.getElementById("page").replaceChildren("The document cannot be shown: " + error.message));
