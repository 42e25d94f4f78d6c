// Files that a session begins with, as data URLs.
const LONGEST_SIDE = 1280;

/** Read any picture that the browser knows, turned as its camera says, small enough to upload. */
export async function pictureUrl(file) {
  const picture = await createImageBitmap(file).catch(() => { throw new Error(`${file.name} cannot be read as a picture`); });
  const scale = Math.min(1, LONGEST_SIDE / Math.max(picture.width, picture.height));
  const canvas = new OffscreenCanvas(Math.max(1, Math.round(picture.width * scale)), Math.max(1, Math.round(picture.height * scale)));
  canvas.getContext("2d").drawImage(picture, 0, 0, canvas.width, canvas.height);
  return dataUrl(await canvas.convertToBlob({ type: "image/png" }));
}

export function dataUrl(blob) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(new Error("The file cannot be read"));
    reader.readAsDataURL(blob);
  });
}
