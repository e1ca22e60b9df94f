-- KEYS[1] meta  [2] due  [3] ended  [4] buckets
-- ARGV[1] prefix of other keys  [2] number of jobs; then bucket and id of each job; then hashes of keys
-- Returns the checkpoint and, if there is one, the records of the jobs and the values of the keys.
local found = mark()
if not found[1] then
  return found
end
local prefix = ARGV[1]
local jobs = tonumber(ARGV[2])
for i = 3, 2 + 2 * jobs, 2 do
  local id = ARGV[i + 1]
  local record = redis.call('HGET', prefix .. 'job:' .. ARGV[i], id)
  if not record and (redis.call('ZSCORE', KEYS[2], id) or redis.call('ZSCORE', KEYS[3], id)) then
    return without_mark()
  end
  found[#found + 1] = record
end
for first = 3 + 2 * jobs, #ARGV, 4000 do
  local names = {}
  for i = first, math.min(first + 3999, #ARGV) do
    names[#names + 1] = prefix .. 'idem:' .. ARGV[i]
  end
  for _, value in ipairs(redis.call('MGET', unpack(names))) do
    found[#found + 1] = value
  end
end
return found
