// Compiles the package to dist/ (ES modules and CommonJS), and the tests and the client under test to build/.
import { execFile } from "node:child_process";
import { copyFileSync, mkdirSync, rmSync, writeFileSync } from "node:fs";
import { createRequire } from "node:module";
import { promisify } from "node:util";

const tsc = createRequire(import.meta.url).resolve("typescript/bin/tsc");
const run = promisify(execFile);

async function compile(...options) {
  try {
    await run(process.execPath, [tsc, ...options]);
  } catch ({ stdout, stderr }) {
    console.error(`tsc ${options.join(" ")}\n${stdout}${stderr}`);
    process.exitCode = 1;
  }
}

for (const folder of ["dist", "build"]) rmSync(folder, { recursive: true, force: true });
await Promise.all([
  compile("-p", "tsconfig.build.json", "--outDir", "dist/esm"),
  compile("-p", "tsconfig.build.json", "--outDir", "dist/cjs", "--module", "CommonJS", "--moduleResolution", "Node10"),
  compile("-p", "tsconfig.json"),
]);
mkdirSync("dist/cjs", { recursive: true });
copyFileSync("../../LICENSE", "dist/LICENSE");
writeFileSync("dist/cjs/package.json", '{ "type": "commonjs" }\n');
